"""The engine by itself: milliseconds of a target's step of 1 and 6 tokens an output, and of a drafter's draft of 5.

A row is printed (Markdown) as soon as it is measured. Models run as a service runs them, in their model thread; there
is no network and no verification. A step's time goes from the logits of one step to those of the next one.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from statistics import median
from typing import Any

from crossdraft.drafter.service import DrafterService
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.served_model import ModelOptions, RunningModel, run_model
from crossdraft.text.letters import NOTHING, Side, from_bytes
from crossdraft.types.messages import Draft, Drafted, OpenDrafter, SamplingOptions, Scored
from crossdraft.types.trees import TokenTree

DRAFT_TOKENS = 5
CHAIN = TokenTree(tuple(range(1, 1 + DRAFT_TOKENS)), tuple(range(-1, DRAFT_TOKENS - 1)))
PROMPT = b"def fibonacci(n):\n    "
CONTEXT_TOKENS = 64  # before each step


def stepping(number: int, tree: TokenTree, rounds: int, at_once: int) -> Job[list[float]]:
    """One output; in the model thread. The seconds from step to step in which all outputs took part."""
    context = tuple((7 * number + 3 * place) % 200 + 1 for place in range(CONTEXT_TOKENS))
    moments: list[tuple[float, bool]] = []
    for _ in range(rounds):
        answer: ForwardResult = yield ForwardRequest(number, context, tree)
        moments.append((time.perf_counter(), answer.sessions == at_once))
    return [after - before for (before, all_before), (after, all_) in pairwise(moments) if all_before and all_]


async def step_ms(running: RunningModel, tree: TokenTree, at_once: int, rounds: int) -> float:
    """The median of a forward of so many outputs."""
    jobs = [running.thread.submit(stepping(number, tree, rounds, at_once)) for number in range(at_once)]
    found = await asyncio.gather(*jobs)
    for number in range(at_once):
        running.thread.close_session(number)
    return 1000 * median(found[0] or [float("nan")])


class Heard:
    """Where a session's replies go."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[Drafted | Scored | BaseException] = asyncio.Queue()

    def send(self, reply: Drafted | Scored, /, within: float = 0.0, join: Any = None) -> None:
        self.replies.put_nowait(reply)

    def fail(self, error: BaseException, /) -> None:
        self.replies.put_nowait(error)

    def working(self) -> None:
        pass

    drop = working


async def draft_ms(running: RunningModel, _: TokenTree, at_once: int, rounds: int) -> float:
    """The median of a greedy draft of 5 tokens of so many outputs, each after the same text."""
    service, heard = DrafterService(running), [Heard() for _ in range(at_once)]
    opening = OpenDrafter(from_bytes(PROMPT), SamplingOptions(0.0), None, 0)
    sessions = [await service.open(opening, one) for one in heard]
    took = []
    for epoch in range(rounds):
        began = time.perf_counter()
        for session in sessions:
            session.receive(Draft(epoch, 0, NOTHING, DRAFT_TOKENS))
        for one in heard:
            reply = await one.replies.get()
            if not isinstance(reply, Drafted) or len(reply.draft_tokens) != DRAFT_TOKENS:
                raise SystemExit(f"the drafter has not drafted: {reply}")
        took.append(time.perf_counter() - began)
    for session in sessions:
        session.close()
    return 1000 * median(took[rounds // 4 :])


Measure = Callable[[RunningModel, TokenTree, int, int], Awaitable[float]]


async def measured(given: argparse.Namespace) -> None:
    """Prints all rows."""
    print("| model | outputs | what | ms |\n| --- | --- | --- | --- |", flush=True)
    stages: list[tuple[str, Side, list[tuple[str, Measure, TokenTree]]]] = [
        (given.target, Side.TARGET, [("1 token", step_ms, TokenTree()), ("6 tokens", step_ms, CHAIN)]),
        (given.drafter, Side.DRAFTER, [("1 token", step_ms, TokenTree()), ("a draft of 5", draft_ms, CHAIN)]),
    ]
    for name, side, parts in stages:
        options = ModelOptions(name, dtype=given.dtype, device=given.device, cache_mib=given.cache_mib)
        running = await asyncio.to_thread(run_model, options, side)
        for at_once in map(int, given.outputs.split(",")):
            for what, measure, tree in parts:
                await measure(running, tree, at_once, 3)
                found = await measure(running, tree, at_once, given.rounds)
                print(f"| {name} | {at_once} | {what} | {found:.2f} |", flush=True)
        running.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="bundled:target")
    parser.add_argument("--drafter", default="bundled:drafter-b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-mib", type=int, default=4096, help="of each model")
    parser.add_argument("--outputs", default="1,16,64,4", help="at once; each in turn")
    parser.add_argument("--rounds", type=int, default=40)
    asyncio.run(measured(parser.parse_args()))


if __name__ == "__main__":
    main()
