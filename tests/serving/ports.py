"""Ports that are chosen before they are used."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

# Above those of Ray's workers, below those that systems give to connections and to whoever asks for any port.
FIRST, SHARE, SHARES = 20_000, 1_000, 10


def _shuffled() -> Iterator[int]:
    """This process's own: those that test beside it, in another process of pytest's, have others."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    begin = FIRST + share * SHARE
    yield from random.sample(range(begin, begin + SHARE), SHARE)


_left = _shuffled()


def free_port() -> int:
    """Of loopback; nobody has it now, it was not given before, and none of the many connections made until it is used
    gets it."""
    for port in _left:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all ports of this process were given")
