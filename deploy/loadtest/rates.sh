#!/bin/sh
# URL: open loop at rising rates (RATES, requests a second). Options of `crossdraft loadtest` may follow.
set -eu
url=${1:?"give the URL of a server, such as http://127.0.0.1:8000"}
shift
for rate in ${RATES:-0.5 1 2 4}; do
    echo "$rate requests a second"
    crossdraft loadtest --url "$url" --rate "$rate" --requests "${REQUESTS:-40}" \
        --json "rate-$rate.json" --plot "rate-$rate.png" "$@"
done
