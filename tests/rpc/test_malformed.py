"""Damaged messages: each stream ends with a status that says whose fault it is, and nothing is left over."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from crossdraft.drafter.ngram import NgramService
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.errors import BROKEN_WRITE
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.letters import Letters
from crossdraft.types.messages import (
    Advance,
    Draft,
    FetchRow,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
    Pass,
    SamplingOptions,
    Score,
)
from crossdraft.types.trees import TokenTree
from tests.rpc.services import ToyTargetService, exchange

STREAMS = 500
AT_ONCE = 20
OPTIONS = SamplingOptions(0.7, 5, logit_bias=((3, 1.5),))
TO_TARGET = [
    target_codec.encode_request(request).SerializeToString()
    for request in (
        OpenTarget((1, 2, 3), OPTIONS, NoiseKey(5), 8),
        Pass(1, (4,), TokenTree((5, 6, 7), (-1, 0, 0)), tuple(np.array([9, 11]) for _ in range(2)), (0, 2)),
        FetchRow(1, 0, np.array([7, 8, 9])),
    )
]
TO_DRAFTER = [
    drafter_codec.encode_request(request).SerializeToString()
    for request in (
        OpenDrafter(Letters("abcabcabcabc"), OPTIONS, NoiseKey(5), 4, np.arange(90, 110)),
        Draft(1, 0, Letters("abcabc"), 6, 2),
        Advance(1, 9),
        Score(1, 6, (Letters("ab"), Letters("ca")), 3),
    )
]
THE_CLIENTS = {
    StatusCode.OK,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.OUT_OF_RANGE,
    StatusCode.CANCELLED,
}


def damaged(messages: Sequence[bytes], chance: random.Random) -> list[bytes]:
    """Messages of which some bits are turned over, cut off, doubled or moved."""
    found = [bytearray(message) for message in messages]
    for _ in range(chance.randint(1, 4)):
        one = chance.choice(found)
        place = chance.randrange(len(one) + 1)
        match chance.randrange(4):
            case 0 if place < len(one):
                one[place] ^= 1 << chance.randrange(8)
            case 1:
                del one[place:]
            case 2:
                one[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 6)))
            case _:
                chance.shuffle(found)
    return [bytes(one) for one in found]


async def statuses(address: str, method: str, messages: Sequence[bytes]) -> Counter[StatusCode]:
    places = asyncio.Semaphore(AT_ONCE)

    async def ended(seed: int) -> StatusCode:
        async with places:
            _, code, text = await exchange(address, method, damaged(messages, random.Random(seed)))
        # A stream that ends while the client still writes: which status the service gave it is not known.
        return StatusCode.CANCELLED if (code, text) == (StatusCode.INTERNAL, BROKEN_WRITE) else code

    return Counter(await asyncio.gather(*map(ended, range(STREAMS))))


async def closed(server: Server, address: str) -> None:
    """Returns when the server has no session any more."""
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address) as channel:
        describe = channel.unary_unary(f"/crossdraft.v1.{server._role.service.rpartition('.')[2]}/Describe")
        while server.activity.open:
            await describe(b"")


@pytest.mark.parametrize("role", ["target", "drafter"])
async def test_damaged_messages_are_the_clients_fault_and_leave_nothing(role: str) -> None:
    listening = Listening(grace_seconds=0)
    if role == "target":
        server, method, messages = Server(TARGET, ToyTargetService(), listening), "Target/Verify", TO_TARGET
    else:
        server, method, messages = Server(DRAFTER, NgramService(), listening), "Drafter/Draft", TO_DRAFTER
    async with server:
        method = f"/crossdraft.v1.{method}"
        replies, code, _ = await exchange(server.address, method, messages)
        assert (len(replies) >= len(messages) - 1, code) == (True, StatusCode.OK)
        found = await statuses(server.address, method, messages)
        assert found.keys() <= THE_CLIENTS, found
        assert found[StatusCode.INVALID_ARGUMENT] > STREAMS // 4
        await closed(server, server.address)
        assert (await exchange(server.address, method, messages))[1] is StatusCode.OK
