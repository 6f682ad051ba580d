#!/bin/sh
# Drafter 0, 1, 5 and 20 ms away: one report over all four. Options of `crossdraft loadtest` may follow.
set -eu
exec crossdraft loadtest --delay-ms 0,1,5,20 --clients 2 --requests 24 --ignore-eos \
    --json delays.json "$@"
