"""An output from a server over gRPC, in Python.

python deploy/examples/generate.py 127.0.0.1:9000 "def main(" --seed 7
"""

import argparse
import asyncio

from crossdraft.client import GenerationRequest, RequestError, SamplingOptions
from crossdraft.rpc.errors import Overloaded, ServiceError
from crossdraft.serving.grpc_client import Client


async def main(given: argparse.Namespace) -> None:
    options = SamplingOptions() if given.temperature is None else SamplingOptions(given.temperature)
    request = GenerationRequest(given.prompt, seed=given.seed, max_tokens=given.max_tokens, options=options)
    async with Client(given.server, given.key) as client:
        async with client.run(request, model=given.model) as generation:
            async for token in generation:
                print(token.text, end="", flush=True)
        figures = generation.statistics
        assert generation.reason is not None
        assert figures is not None
        print(f"\n{generation.reason.value}: {figures.tokens} tokens, {figures.tokens_per_pass:.2f} a pass")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="host:port of `crossdraft serve grpc`")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="", help="by default the server's only one")
    parser.add_argument("--key", default="", help="of the API")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--temperature", type=float, help="by default the model's own")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))
    except RequestError as error:
        raise SystemExit(f"the request cannot be served: {error}") from error
    except Overloaded as error:
        raise SystemExit(f"{error}; ask again after {error.after:g} s") from error
    except ServiceError as error:
        raise SystemExit(str(error)) from error
