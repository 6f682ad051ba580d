#!/bin/sh
# URL: open loop at rising rates (RATES, requests a second), by GuideLLM. Options of `guidellm run` may follow.
set -eu
url=${1:?"give the URL of a server, such as http://127.0.0.1:8000"}
shift
prompts=${PROMPTS:-$(dirname "$0")/../../tests/prompts.jsonl}
for rate in ${RATES:-0.5 1 2 4}; do
    guidellm run --backend "kind=openai_http,target=$url,request_format=/v1/completions" \
        --profile "kind=poisson,rate=$rate" --data "kind=json_file,path=$prompts" \
        --constraint "kind=max_requests,count=${REQUESTS:-40}" --output "kind=json,path=rate-$rate.json" "$@"
done
