"""One id finds the lines of all that worked for a request."""

import io
import json
from contextlib import aclosing
from dataclasses import replace

from crossdraft.client import GenerationRequest, Overlap
from crossdraft.config.service import LogFormat
from crossdraft.drafter.ngram import ServeNgram, ngram_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.serving.backend import LocalBackend, LocalModel, NamedDrafter, OutputRequest
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.target.service import ServeTarget, target_server
from tests.rpc.linked import AT_ONCE
from tests.serving.exposed import samples, value

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
                            pass
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for name in ("req-one", "req-two"):
        mine = [line for line in lines if line.get("request_id") == name]
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
