"""Lines of the log, as people and programs read them."""

import io
import json
import logging

import pytest

from crossdraft.client import GenerationRequest
from crossdraft.config.service import LogFormat, LogLevel
from crossdraft.rpc.log_context import about
from crossdraft.serving.backend import OutputRequest
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from tests.serving.fakes import FakeBackend

log = logging.getLogger("crossdraft.somewhere")


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_the_hub_is_written_once() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    hub, own = logging.getLogger("huggingface_hub"), logging.StreamHandler(theirs)
    hub.addHandler(own)
    try:
        with logged(stream=stream):
            hub.warning("retrying")
        hub.warning("afterwards")
    finally:
        hub.removeHandler(own)
    assert (stream.getvalue(), theirs.getvalue()) == ("crossdraft: retrying\n", "afterwards\n")


def test_a_json_line_says_what_it_is_about() -> None:
    stream = io.StringIO()
    with logged(LogFormat.JSON, stream=stream), about(request="req-1", session="target-4", peer="ipv4:1.2.3.4:5"):
        log.info("passes: %d", 3, extra={"figures": {"passes": 3}})
    with logged(LogFormat.JSON, stream=stream):
        try:
            raise ZeroDivisionError("a fault")
        except ZeroDivisionError:
            log.exception("it failed")
    line, failed = lines(stream)
    assert set(failed) == {"time", "level", "logger", "message", "exception"}  # what is not known is left out
    assert "ZeroDivisionError: a fault" in str(failed["exception"])
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "level": "info", "logger": "crossdraft.somewhere", "message": "passes: 3", "request_id": "req-1",
        "session": "target-4", "peer": "ipv4:1.2.3.4:5", "figures": {"passes": 3},
    }  # fmt: skip


@pytest.mark.parametrize("form", LogFormat)
def test_a_message_of_several_lines_is_one_line(form: LogFormat) -> None:
    stream = io.StringIO()
    with logged(form, stream=stream):
        log.warning('told:\n{"level": "info", "message": "forged"}\r\nend')
    assert len(stream.getvalue().splitlines()) == 1


def test_plain_lines() -> None:
    stream = io.StringIO()
    with logged(stream=stream):
        log.info("nobody in particular")
        with about(request="req-1"):
            log.info("somebody")
    assert stream.getvalue() == "crossdraft: nobody in particular\ncrossdraft: somebody [request req-1]\n"


def test_the_level_and_the_end() -> None:
    stream = io.StringIO()
    with logged(level=LogLevel.WARNING, stream=stream):
        log.info("not shown")
    log.warning("not shown either")
    assert stream.getvalue() == ""


async def test_an_output_says_its_request_and_how_it_ended() -> None:
    stream = io.StringIO()
    measured = MeasuredBackend(FakeBackend(), Metrics())
    with logged(LogFormat.JSON, stream=stream):
        async for _ in measured.stream(OutputRequest("req-9", "toy", GenerationRequest("a"))):
            log.info("the caller's own line")
    written = lines(stream)
    of_output = [line for line in written if str(line["message"]).startswith("output")]
    assert [line.get("request_id") for line in of_output] == ["req-9", "req-9"]
    assert "output ended (stop)" in str(of_output[-1]["message"])
    assert not [line for line in written if "own line" in str(line["message"]) and "request_id" in line]
