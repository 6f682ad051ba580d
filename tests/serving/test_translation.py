"""Nothing of a request or of its figures is forgotten between gRPC and the pipeline; servers that begin together."""

import json
from dataclasses import replace

import pytest

from crossdraft.client import Reason
from crossdraft.rpc import generation
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.generation import GenerationEnded
from crossdraft.rpc.server import Listening
from crossdraft.serving.grpc import serve_generation
from crossdraft.serving.servers import Together
from crossdraft.types.statistics import LaneFigures, Trips
from tests.serving.fakes import FakeBackend, figures
from tests.serving.ports import free_port


def test_lanes_are_sent_without_where_services_are() -> None:
    lane = LaneFigures("target", "10.0.0.1:7001", 1, 2, Trips((3, 4), 0.5, 0.25), "unreachable", 0.1, 0.2, 0.9, 0.3)
    ended = GenerationEnded("r-1", Reason.STOP, replace(figures(4), lanes=(lane,)))
    sent = generation.encode_reply(ended)
    assert b"10.0.0.1" not in sent.SerializeToString()
    arrived = generation.decode_reply(sent)
    statistics = replace(ended.statistics, lanes=(replace(lane, address=""),))
    assert arrived == replace(ended, statistics=statistics)


async def test_servers_begin_and_end_together() -> None:
    first, second = (serve_generation(FakeBackend(), Listening(port=free_port(), grace_seconds=0)) for _ in range(2))
    async with Together(first, {"other": second}) as both:
        line = json.loads(both.ready_line())
        assert (line["address"], line["other"]) == (first.address, second.address)
        taken = Listening(port=int(first.address.rpartition(":")[2]), grace_seconds=0)
        third = serve_generation(FakeBackend(), Listening(port=free_port(), grace_seconds=0))
        with pytest.raises(CannotListen):
            await Together(serve_generation(FakeBackend(), taken), {"third": third}).__aenter__()
        free = Listening(port=int(third.address.rpartition(":")[2]), grace_seconds=0)
        async with serve_generation(FakeBackend(), free):  # the third one has ended again
            pass
    async with serve_generation(FakeBackend(), taken):
        pass
