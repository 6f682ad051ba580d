"""A process that relays TCP connections and delays their bytes: distance where namespaces are not allowed.

    python -m crossdraft.lab.emulation.relay NAME ...

Hosts are only names: their services run on this machine's loopback, and are reached through a port of this process.
Handshakes and acknowledgements are not delayed. The process ends with its standard input.
"""

import asyncio
import json
import selectors
import sys
from collections.abc import Sequence

from crossdraft.lab.emulation.network import DelayLine, HostNamespace, Shape, run_in_real_time, say, write_places

LOOPBACK = "127.0.0.1"
PIECE = 65_536  # bytes read at once
PIECES = 256  # on their way in one direction; then the sender has to wait, as with TCP
Stamped = tuple[float, bytes]  # when the piece is due; an empty one: the end


class Relayed:
    """The link to one host, and the servers that stand for its services."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._open = asyncio.Event()
        self._open.set()
        self._servers: dict[str, asyncio.Server] = {}  # by the address that is reached through them

    def reshape(self, shape: Shape) -> None:
        """Takes effect for what enters from now on. What is on its way when the link is cut arrives when it heals."""
        self.shape = shape
        if shape.cut:
            self._open.clear()
        else:
            self._open.set()

    async def through(self, address: str) -> str:
        """A port of this process that leads to `address`."""
        if address not in self._servers:
            host, _, port = address.rpartition(":")

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._join(reader, writer, host, int(port))

            self._servers[address] = await asyncio.start_server(connected, LOOPBACK)
        return f"{LOOPBACK}:{self._servers[address].sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        except OSError:  # either end is gone: so is the other
            pass
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until the sender has ended and everything is delivered; raises OSError if an end is lost."""
        pieces: asyncio.Queue[Stamped] = asyncio.Queue(PIECES)
        taking = asyncio.ensure_future(self._take(reader, pieces))
        try:
            await self._deliver(pieces, writer)
            await taking
        finally:
            taking.cancel()

    async def _take(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[Stamped]) -> None:
        loop, line, piece = asyncio.get_running_loop(), DelayLine(), b"more"
        while piece:
            try:
                piece = await reader.read(PIECE)
            except OSError:
                piece = b""
            await pieces.put((line.due(loop.time(), self.shape.delay_ms), piece))

    async def _deliver(self, pieces: asyncio.Queue[Stamped], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, piece = await pieces.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._open.wait()
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()


async def _serve(names: Sequence[str]) -> None:
    links = {name: Relayed(Shape(name)) for name in names}
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    say(write_places(dict.fromkeys(names, HostNamespace((), LOOPBACK))))
    while line := await orders.readline():
        shape = Shape(**json.loads(line))
        links[shape.host].reshape(shape)
        answer = await links[shape.host].through(shape.service) if shape.service else ""
        say(answer.encode() + b"\n")


def main(names: Sequence[str]) -> None:
    """Carries bytes until standard input ends."""
    run_in_real_time()
    # select and not epoll, whose waits are whole milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(_serve(names))


if __name__ == "__main__":
    main(sys.argv[1:])
