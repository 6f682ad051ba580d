"""How long large requests hold up other clients: `python -m tests.serving.large_requests`.

The bundled target and an HTTP server run as processes. One client streams without an end, and another asks for
/health, while processes of their own send large prompts, long lists, malformed bodies, headers without an end, half of
requests or nothing, and ordinary requests of many clients.
"""

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import httpx2 as httpx

COMMAND = (sys.executable, "-m", "crossdraft.cli")
STREAMED = {"prompt": "def main(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
MIB = 2**20
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


def bad_words(url: str) -> None:
    """Four requests of 8 outputs with as many bad words as there may be."""
    words = [f"never to be written {number:05}" + "x" * 30 for number in range(1024)]
    _post_all(url, [{"prompt": "def main(", "n": 8, "max_tokens": 4, "bad_words": words}] * 4)


def allowed_ids(url: str) -> None:
    """Four requests of 4 outputs with 2^20 allowed ids, all below 100."""
    ids = [number % 100 for number in range(2**20)]
    _post_all(url, [{"prompt": "def main(", "n": 4, "max_tokens": 4, "allowed_token_ids": ids}] * 4)


def invalid(url: str) -> None:
    """Eight invalid bodies of 3.9 MB, three times over, and how long small requests take meanwhile."""
    bodies = [b'{"prompt": [' + b"{}," * 1_300_000 + b"1]}", b'{"prompt": [' + b'["a"],' * 650_000 + b"1]}"] * 12
    asking = threading.Thread(target=_post_all, args=(url, bodies))
    asking.start()
    waits = []
    while asking.is_alive():
        began = time.perf_counter()
        _post_all(url, [{"prompt": "def main(): " * 100, "max_tokens": 1}], told=False)
        waits.append(time.perf_counter() - began)
    print(f"     a small request took at most {max(waits):.3f} s", flush=True)


def long_header(url: str) -> None:
    """Three connections that send a header of 80 MB each."""
    for _ in range(3):
        with socket.create_connection(_address(url)) as one, suppress(ConnectionError):
            one.sendall(b"GET /health HTTP/1.1\r\nlong: ")
            for _ in range(80):
                one.sendall(b"x" * MIB)


def half_sent(url: str) -> None:
    """A thousand connections with half a request, which are left open for 25 s."""
    _open(url, 1000, b"POST /v1/completions HTTP/1.1\r\ncontent-le", 25)


def silent(url: str) -> None:
    """300 silent connections, which are left open for 5 s."""
    _open(url, 300, b"", 5)


def _open(url: str, count: int, sent: bytes, seconds: float) -> None:
    with ExitStack() as opened:
        ended = [opened.enter_context(socket.create_connection(_address(url))) for _ in range(count)]
        for one in ended:
            with suppress(ConnectionError):
                one.sendall(sent)
        time.sleep(seconds)
        print("     of", count, "connections are closed:", sum(map(_is_closed, ended)), flush=True)


def _is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


LOADS: tuple[Load, ...] = (
    large_prompts, large_ids, large_chat, malformed, clients, bad_words, allowed_ids, invalid, long_header, half_sent,
    silent,
)  # fmt: skip


def _post_all(url: str, bodies: list, path: str = "/v1/completions", at_once: int = 8, told: bool = True) -> None:
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
        if told:
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
    await asyncio.sleep(5)
    print(f"5 s later: {resident_mib(pid):.0f} MiB")
    async with httpx.AsyncClient(base_url=url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    print("\n".join(line for line in lines if "event_loop_lag" in line))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bundled:target", help="of the target")
    parser.add_argument("--loads", nargs="+", default=[one.__name__ for one in LOADS], help="only these")
    parser.add_argument("--handles", type=int, default=4096, help="file handles that the HTTP server may have")
    given = parser.parse_args()
    loads = [one for one in LOADS if one.__name__ in given.loads]
    with process("target", "--model", given.model, "--port", "0") as (_, target):
        served = ("http", "--model", "m", "--target", target["address"], "--port", "0")
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (given.handles, before[1]))
        with process(*served) as (pid, front):
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            asyncio.run(measure(f"http://{front['address']}", pid, loads))


if __name__ == "__main__":
    main()
