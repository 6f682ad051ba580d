#!/bin/sh
# What the fronts add to a pipeline in the client's process. Options of `crossdraft loadtest` may follow.
set -eu
exec crossdraft loadtest --over http --over grpc --compare --clients 1 --requests 24 --repeat 2 --ignore-eos \
    --json compare.json "$@"
