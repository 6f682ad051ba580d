"""A link that can be cut without a word: a TCP proxy that stops forwarding and closes nothing."""

import asyncio
from typing import Self


class Link:
    """Forwards connections to an address, both ways, until it is cut."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def cut(self) -> None:
        """From now on nothing arrives; no socket is closed."""
        self._whole.clear()

    def mend(self) -> None:
        """What was held back arrives, and what follows."""
        self._whole.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(self._host, self._port)
        self._tasks.add(asyncio.create_task(self._forward(near_in, far_out)))
        self._tasks.add(asyncio.create_task(self._forward(far_in, near_out)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # one side is gone
        finally:
            sink.close()
