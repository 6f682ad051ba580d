"""How long large requests hold up other clients: `python -m tests.serving.large_requests`.

The bundled target and an HTTP server run as processes. One client streams without an end, and another asks for
/health, while processes of their own send large prompts, malformed bodies, and ordinary requests of many clients.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import httpx2 as httpx

COMMAND = (sys.executable, "-m", "crossdraft.cli")
STREAMED = {"prompt": "def main(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
Load = Callable[[str], None]


def large_prompts(url: str) -> None:
    """Three prompts of 3 MB, one of words and two without a blank, at the same time."""
    _post_all(url, [{"prompt": ("word " * 600_000), "max_tokens": 1}, *[{"prompt": "x" * 3_000_000}] * 2])


def large_ids(url: str) -> None:
    """Three prompts of a million ids."""
    _post_all(url, [{"prompt": [7] * 1_000_000, "max_tokens": 1}] * 3)


def large_chat(url: str) -> None:
    """Three chats of 3 MB, in messages of 1 KB."""
    messages = [{"role": "user", "content": "word " * 200}] * 3000
    _post_all(url, [{"messages": messages, "max_tokens": 1}] * 3, "/v1/chat/completions")


def malformed(url: str) -> None:
    """A thousand bodies that are refused, every tenth of nearly 4 MiB."""
    small: list[bytes] = [
        b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "x", "temperatur": 1}', b"\xff", b'{"prompt": "x", "stop": [1, 2]}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "x", "n": "two"}', b'{"prompt": []}',
    ]  # fmt: skip
    large = [
        b"[" * 4_000_000,
        b'{"prompt": [' + b"true," * 800_000 + b"1]}",
        b'{"prompt": [' + b"{}," * 1_300_000 + b"1]}",
        b'{"prompt": "x", "stop": [' + b"1," * 2_000_000 + b"1]}",
        b"{" + b",".join(b'"a%d":1' % number for number in range(300_000)) + b"}",
        b'{"prompt": "x", "logit_bias": {' + b",".join(b'"a%d":1' % number for number in range(300_000)) + b"}}",
        b'{"prompt": "' + b"x" * 4_000_000,
    ]
    bodies = [large[number // 10 % len(large)] if number % 10 == 0 else small[number % 9] for number in range(1000)]
    _post_all(url, bodies)


def clients(url: str) -> None:
    """200 clients, each with two requests of 16 tokens."""
    _post_all(url, [{"prompt": f"def f{number}(", "max_tokens": 16} for number in range(400)], at_once=200)


LOADS: tuple[Load, ...] = (large_prompts, large_ids, large_chat, malformed, clients)


def _post_all(url: str, bodies: list, path: str = "/v1/completions", at_once: int = 8) -> None:
    async def post_all() -> None:
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=at_once)) as http:

            async def post(body: object) -> str:
                async with limit:
                    raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
                    reply = await http.post(path, content=raw, headers={"content-type": "application/json"})
                    return f"{reply.status_code} {reply.text[:150]}"

            replies = await asyncio.gather(*map(post, bodies))
        statuses = [reply[:3] for reply in replies]
        counts = {status: statuses.count(status) for status in sorted(set(statuses))}
        print("    ", counts, replies[0][4:], flush=True)

    asyncio.run(post_all())


@contextmanager
def process(*arguments: str) -> Iterator[tuple[int, dict]]:
    """A server: its process id and its ready line."""
    running = subprocess.Popen([*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running.pid, json.loads(running.stdout.readline())
    finally:
        running.terminate()
        running.wait()


def resident_mib(pid: int) -> float:
    """What a process holds, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[dict[str, list[float]]]:
    """Gaps of a stream and round trips of /health, in seconds, while the block runs."""
    found: dict[str, list[float]] = {"gap": [], "health": []}

    async def stream(http: httpx.AsyncClient) -> None:
        while True:
            async with http.stream("POST", "/v1/completions", json=STREAMED) as reply:
                latest = None
                async for _ in reply.aiter_lines():
                    now = time.perf_counter()
                    if latest is not None:
                        found["gap"].append(now - latest)
                    latest = now

    async def health(http: httpx.AsyncClient) -> None:
        while True:
            began = time.perf_counter()
            await http.get("/health")
            found["health"].append(time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(base_url=url, timeout=600) as one, httpx.AsyncClient(base_url=url, timeout=600) as two:
        tasks = [asyncio.create_task(stream(one)), asyncio.create_task(health(two))]
        await asyncio.sleep(1)
        yield found
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, pid: int, loads: Sequence[Load]) -> None:
    """Prints a line for each load."""
    await asyncio.to_thread(_post_all, url, [{"prompt": "def main("}])
    print(f"at first: {resident_mib(pid):.0f} MiB", flush=True)
    for load in (None, *loads):
        async with watched(url) as found:
            began = time.perf_counter()
            if load is None:
                await asyncio.sleep(5)
            else:
                disturbing = get_context("spawn").Process(target=load, args=(url,))
                disturbing.start()
                await asyncio.to_thread(disturbing.join)
            took = time.perf_counter() - began
        name = "nothing" if load is None else load.__name__
        gap, health = max(found["gap"], default=took), max(found["health"], default=took)
        print(
            f"{name:14} {took:6.1f} s, longest gap {gap:6.3f} s, longest /health {health:6.3f} s, "
            f"{resident_mib(pid):.0f} MiB",
            flush=True,
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bundled:target", help="of the target")
    parser.add_argument("--loads", nargs="+", default=[one.__name__ for one in LOADS], help="only these")
    given = parser.parse_args()
    loads = [one for one in LOADS if one.__name__ in given.loads]
    with process("target", "--model", given.model, "--port", "0") as (_, target):
        served = ("http", "--model", "m", "--target", target["address"], "--port", "0")
        with process(*served) as (pid, front):
            asyncio.run(measure(f"http://{front['address']}", pid, loads))


if __name__ == "__main__":
    main()
