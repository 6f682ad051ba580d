"""Lines of the log, as people and programs read them; one id finds those of all that worked for a request."""

import io
import json
import logging
from contextlib import aclosing
from dataclasses import replace

import pytest

from crossdraft.client import GenerationRequest, Overlap
from crossdraft.config.service import LogFormat, LogLevel
from crossdraft.drafter.ngram import ServeNgram, ngram_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.log_context import about
from crossdraft.serving.backend import LocalBackend, LocalModel, NamedDrafter, OutputRequest
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.target.service import ServeTarget, target_server
from tests.rpc.linked import AT_ONCE
from tests.serving.exposed import samples, value

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


# In lock-step the output waits for its drafter, however late that is.
REQUEST = OutputRequest("", "tiny", GenerationRequest("abcabcabc", max_tokens=60, ignore_eos=True, overlap=Overlap.OFF))


async def test_a_request_is_found_in_every_services_lines() -> None:
    stream, metrics = io.StringIO(), Metrics()
    with logged(LogFormat.JSON, stream=stream):
        async with (
            await target_server(ServeTarget(ModelOptions("bundled:target", budget=128, threads=1), AT_ONCE)) as target,
            ngram_server(ServeNgram(listening=AT_ONCE)) as drafter,
        ):
            model = LocalModel("tiny", (target.address,), (NamedDrafter("copy", (drafter.address,)),))
            async with LocalBackend(model) as outputs:
                measured = MeasuredBackend(outputs, metrics)
                for name in ("req-one", "req-two"):
                    async with aclosing(measured.stream(replace(REQUEST, id=name))) as made:
                        async for _ in made:
                            log.info("the caller's own line")
    written = lines(stream)
    assert not [line for line in written if "own line" in str(line["message"]) and "request_id" in line]
    for name in ("req-one", "req-two"):
        mine = [line for line in written if line.get("request_id") == name]
        requested, ended = [text for line in mine if (text := str(line["message"])).startswith("output")]
        assert (requested.partition(":")[0], ended.partition(" after")[0]) == (
            "output requested",
            "output ended (length)",
        )
        roles = {str(line.get("session", "")).partition("-")[0] for line in mine}
        assert roles == {"", "target", "drafter"}
        opened = [line for line in mine if line["message"] == "session opened"]
        assert len(opened) == 2
        assert all(line["peer"] for line in opened)
    peers = {"role": "target", "peer": target.address}
    text = metrics.text()[0].decode()
    assert value(text, "round_trip_seconds_count", peers) >= 2
    assert value(text, "wire_bytes_total", peers | {"direction": "sent"}) > 0
    assert {labels["peer"] for labels, _ in samples(text, "wire_bytes_total")} == {target.address, drafter.address}
