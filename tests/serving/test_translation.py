"""Nothing of a request or of its figures is forgotten between gRPC and the pipeline; servers that begin together."""

import json
from dataclasses import fields, replace

import pytest

from crossdraft.client import GenerationRequest, Reason, Statistics
from crossdraft.rpc import generation
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.generation import Generate, GenerationEnded, LaneCost
from crossdraft.rpc.server import Listening
from crossdraft.serving import grpc
from crossdraft.serving.backend import Ended
from crossdraft.serving.grpc import serve_generation
from crossdraft.serving.servers import Together
from crossdraft.types.statistics import LaneFigures, Trips
from crossdraft.v1 import generation_pb2
from tests.serving.fakes import FakeBackend, figures
from tests.serving.ports import free_port


def names(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def test_every_field_of_a_request_can_be_asked_for_or_stays_with_the_server() -> None:
    assert names(GenerationRequest) == {*grpc.SAME, *grpc.LOCAL_ONLY}
    assert names(Generate) - names(GenerationRequest) == {"id", "model", "drafter"}


def test_every_figure_is_sent() -> None:
    sent = set(generation_pb2.Statistics.DESCRIPTOR.fields_by_name)
    assert sent == set(grpc.FIGURES) == names(Statistics)


def test_of_lanes_all_is_sent_but_where_services_are() -> None:
    assert set(generation_pb2.Lane.DESCRIPTOR.fields_by_name) == names(LaneCost)
    assert names(LaneFigures) - set(grpc.OF_LANES) == {"address", "trips"}
    lane = LaneFigures("target", "10.0.0.1:7001", 1, 2, Trips((3, 4), 0.5, 0.25), "unreachable", 0.1, 0.2, 0.9, 0.3)
    ended = Ended(Reason.STOP, replace(figures(4), lanes=(lane,)))
    sent = grpc.ended(ended, "r-1")
    assert "10.0.0.1" not in repr(sent)
    arrived = generation.decode_reply(generation.encode_reply(sent))
    assert isinstance(arrived, GenerationEnded)
    assert grpc.ended_of(arrived) == replace(
        ended, statistics=replace(ended.statistics, lanes=(replace(lane, address=""),))
    )


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
