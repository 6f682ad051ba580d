"""What is counted of outputs, whoever makes them; the dashboard, the alerts and docs/metrics.md name what there is. And
lines of the log, as people and programs read them; one id finds those of all that worked for a request."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import accumulate, chain, repeat
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from crossdraft.client import GenerationRequest, Overlap, Reason, RequestError
from crossdraft.cluster.failover import LossMetrics
from crossdraft.cluster.orchestrators import OrchestratorMetrics
from crossdraft.config.engine import NgramOptions
from crossdraft.config.service import LogFormat, LogLevel, SessionOptions
from crossdraft.drafter.ngram import ngram_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.errors import Overloaded, Unreachable
from crossdraft.rpc.generation import OutputEnded
from crossdraft.rpc.handlers import CLOSED, Activity
from crossdraft.rpc.logs import about, logged
from crossdraft.rpc.metrics import PREFIX, ServiceMetrics, exposition
from crossdraft.serving.backend import LocalBackend, LocalModel, NamedDrafter, OutputRequest
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.target.service import target_server
from crossdraft.types.statistics import BOUNDS, COARSE, PARTS, LaneFigures, ModelStatistics, Trips
from tests.rpc.linked import AT_ONCE
from tests.serving.exposed import faults, names, samples, value
from tests.serving.fakes import TOKENS, TOY, FakeBackend, figures

REQUEST = OutputRequest("req-1", "toy", GenerationRequest("a"))
WHO = {"model_name": "toy", "drafter": "auto"}
ALL = WHO | {"method": "slem"}


def ticking(*steps: float) -> Callable[[], float]:
    """A clock that shows the sums of these."""
    _, *sums = accumulate(steps or (0.0,), initial=100.0)
    return chain(sums, repeat(sums[-1])).__next__


async def drained(measured: MeasuredBackend, order: OutputRequest = REQUEST) -> None:
    async with aclosing(measured.stream(order)) as stream:
        async for _ in stream:
            pass


async def exposed(outputs: FakeBackend, *times: float, orders: Sequence[OutputRequest] = (REQUEST,)) -> str:
    """The metrics of outputs, of which order, items, end, and what is after it have these times between them."""
    metrics = Metrics()
    measured = MeasuredBackend(outputs, metrics, ticking(*times))
    for order in orders:
        with suppress(LookupError):
            await drained(measured, order)
    return metrics.text()[0].decode()


def check(text: str, live: dict[str, float], ended: dict[str, float]) -> None:
    """Compares metrics of an output under way, and of one that has ended."""
    for values, labels in ((live, WHO), (ended, ALL)):
        assert {name: value(text, name, labels) for name in values} == values


async def test_times_are_counted_from_the_order() -> None:
    text = await exposed(FakeBackend(tokens=TOKENS[:3]), 0.0, 0.5, 0.25, 0.125, 1.0, 9.0)
    live = {
        "time_to_first_token_seconds_sum": 0.5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.375,
        "inter_token_latency_seconds_count": 2,
        "generation_tokens_total": 3,
    }
    ended = {
        "e2e_request_latency_seconds_sum": 1.875,
        "request_time_per_output_token_seconds_sum": 0.1875,
        "request_queue_time_seconds_sum": 0.375,  # the session's own first token took 0.125
        "request_generation_tokens_sum": 3,
    }
    check(text, live, ended)
    assert value(text, "request_success_total", ALL | {"finished_reason": "stop"}) == 1


async def test_tokens_of_one_pass_have_no_time_between_them() -> None:
    text = await exposed(FakeBackend(together=2), 0.0, 0.5, 0.25, 1.0)  # four tokens
    first, between = "time_to_first_token_seconds_sum", "inter_token_latency_seconds"
    check(
        text,
        {first: 0.5, f"{between}_sum": 0.25, f"{between}_count": 3, "generation_tokens_total": 4},
        {"request_generation_tokens_sum": 4},
    )


async def test_statistics_are_added_up() -> None:
    """Draft tokens and accepted ones both with those of branches that were adopted: their ratio is at most 1."""
    text = await exposed(FakeBackend(reason=Reason.LENGTH), orders=[REQUEST] * 2)
    spec = {"num_drafts_total": 4, "num_draft_tokens_total": 6, "num_accepted_tokens_total": 4}
    ended = {"prompt_tokens_total": 6, "target_passes_total": 4, "fallbacks_total": 0}
    check(text, {}, ended | {f"spec_decode_{name}": count for name, count in spec.items()})
    for name, labels, count in (
        ("spec_decode_num_accepted_tokens_per_pos_total", {"position": "0"}, 4),
        ("spec_decode_num_accepted_tokens_per_pos_total", {"position": "1"}, 0),
        ("emitted_tokens_total", {"kind": "accepted"}, 4),
        ("emitted_tokens_total", {"kind": "corrected"}, 2),
        ("request_success_total", {"finished_reason": "length"}, 2),
    ):
        assert value(text, name, ALL | labels) == count


async def test_what_crossed_the_wire_is_counted_by_peer(caplog: pytest.LogCaptureFixture) -> None:
    lanes = (
        LaneFigures("target", "a:1", 10, 20, Trips((1,) * (len(BOUNDS) + 1), 5.0)),
        LaneFigures("target", "c:3", 0, 0, Trips(), "unreachable"),
        LaneFigures("drafter", "b:2", 3, 4, Trips(), "timed_out"),
        LaneFigures("drafter", "", 0, 0, Trips()),
    )
    ended = OutputEnded(Reason.STOP, replace(figures(1), lanes=lanes, drafter_lost="too slow"))
    with caplog.at_level("INFO", "crossdraft.serving"):
        text = await exposed(FakeBackend(tokens=(), end=ended))
    assert caplog.messages[-1].endswith("; target at c:3 lost: unreachable; drafter lost: too slow")
    target = {"role": "target", "peer": "a:1"}
    assert value(text, "wire_bytes_total", target | {"direction": "sent"}) == 10
    assert value(text, "wire_bytes_total", target | {"direction": "received"}) == 20
    assert value(text, "round_trip_seconds_sum", target) == 5.0
    assert value(text, "round_trip_seconds_count", target) == len(BOUNDS) + 1
    assert value(text, "round_trip_seconds_bucket", target | {"le": str(COARSE[1])}) == 2 * PARTS
    assert value(text, "services_lost_total", {"role": "drafter", "cause": "timed_out"}) == 1
    assert value(text, "fallbacks_total", ALL) == 1
    assert not [labels for labels, _ in samples(text, "wire_bytes_total") if not labels["peer"]]


async def test_waiting_and_running() -> None:
    metrics = Metrics()
    outputs = FakeBackend(waits_after=0)
    measured = MeasuredBackend(outputs, metrics)

    def now() -> tuple[float, float]:
        text = metrics.text()[0].decode()
        model = {"model_name": "toy"}
        return value(text, "num_requests_waiting", model), value(text, "num_requests_running", model)

    stream = measured.stream(REQUEST)
    first = asyncio.create_task(anext(stream))
    await outputs.wait_running(1)
    assert (now(), metrics.outputs) == ((1, 0), 1)
    outputs.go_on.set()
    await first
    assert (now(), metrics.outputs) == ((0, 1), 1)
    await stream.aclose()
    assert (now(), metrics.outputs) == ((0, 0), 0)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_output_that_nobody_wants_any_more_is_aborted(cancelled: bool) -> None:
    """The client leaves, or whoever waits for it is cancelled."""
    metrics, outputs = Metrics(), FakeBackend(waits_after=1)
    measured = MeasuredBackend(outputs, metrics)
    if cancelled:
        task = asyncio.create_task(drained(measured))
        await outputs.wait_running(1)
        task.cancel()
        await asyncio.wait([task])
    else:
        async with aclosing(measured.stream(REQUEST)) as stream:
            await anext(stream)
    text = metrics.text()[0].decode()
    aborted = WHO | {"method": "default", "finished_reason": "abort"}
    assert value(text, "request_success_total", aborted) == 1
    assert value(text, "num_requests_running", {"model_name": "toy"}) == 0
    assert value(text, "num_requests_waiting", {"model_name": "toy"}) == 0
    assert outputs.running == 0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (RequestError("change this"), "bad_request"),
        (Overloaded("full", 1.0), "overloaded"),
        (Unreachable("target at a:1: gone"), "service_unreachable"),
        (ZeroDivisionError("a fault"), "internal"),
    ],
)
async def test_failures_are_counted_by_cause(fault: Exception, cause: str) -> None:
    metrics = Metrics()
    with pytest.raises(type(fault)):
        await drained(MeasuredBackend(FakeBackend(fault=fault, fault_after=2), metrics))
    text = metrics.text()[0].decode()
    assert value(text, "request_failures_total", WHO | {"method": "default", "cause": cause}) == 1
    assert not samples(text, "request_success_total")


async def test_clients_cannot_make_labels() -> None:
    models = [replace(REQUEST, model=f"made-up-{number}") for number in range(20)]
    others = [replace(REQUEST, drafter=name) for name in (*(one.model for one in models), "small", "")]
    text = await exposed(FakeBackend(), orders=[*models, *others])
    seen = {labels["model_name"] for labels, _ in samples(text, "num_requests_waiting")}
    assert seen == {"toy", "unknown"}
    drafters = {labels["drafter"] for labels, _ in samples(text, "request_success_total")}
    assert drafters == {"unknown", "small", "none"}


async def test_an_output_whose_drafter_was_chosen_for_it_is_counted_under_its_name() -> None:
    ended = OutputEnded(Reason.STOP, replace(figures(1), drafter="small"))
    text = await exposed(FakeBackend(end=ended), orders=[replace(REQUEST, drafter="auto")])
    assert {labels["drafter"] for labels, _ in samples(text, "request_success_total")} == {"small"}
    assert {labels["drafter"] for labels, _ in samples(text, "time_to_first_token_seconds_count")} == {"auto"}


async def test_a_model_whose_target_is_not_there_yet_has_its_name() -> None:
    outputs = FakeBackend(unreached=(replace(TOY, name="late"),))
    text = await exposed(outputs, orders=[replace(REQUEST, model="late")])
    ((labels, count),) = samples(text, "request_failures_total")
    assert (labels["model_name"], labels["drafter"], count) == ("late", "default", 1)


async def test_positions_are_bounded() -> None:
    ended = OutputEnded(Reason.STOP, replace(figures(1), accepted_at=(1,) * 1000))
    counted = samples(await exposed(FakeBackend(end=ended)), "spec_decode_num_accepted_tokens_per_pos_total")
    assert {labels["position"]: count for labels, count in counted} == {str(one): 1 for one in range(32)} | {"32+": 968}


FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "crossdraft.json"
ALERTS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "alerts.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAME = re.compile(rf"{PREFIX}[a-zA-Z0-9_]+")


USED = ModelStatistics(5, 0.5, {1: 3, 2: 1, 300: 1}, 40, 4, 1, 7, 0.25, 1)


@pytest.fixture
async def front() -> str:
    """What a front says after an output."""
    return await exposed(FakeBackend())


@pytest.fixture
def service() -> str:
    """What a service says after a session."""
    registry, activity = CollectorRegistry(), Activity("target", SessionOptions())
    registry.register(ServiceMetrics("target", "toy", activity, lambda: USED))
    activity.end(activity.begin("", "", ""), CLOSED)
    return exposition(registry)[0].decode()


def queries() -> Iterator[str]:
    board = json.loads(FILE.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def cluster() -> list[str]:
    """What a cluster's processes say besides."""
    losses, orchestrator = CollectorRegistry(), OrchestratorMetrics("toy")
    LossMetrics(losses, ["toy"])
    return [exposition(one)[0].decode() for one in (losses, orchestrator.registry)]


def test_every_metric_that_the_dashboard_and_alerts_ask_for_is_there(front: str, service: str) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 30
    assert asked <= {name for text in (front, service, *cluster()) for name in names(text)}
    assert {f"{PREFIX}{name}" for name in ("orchestrators_lost_total", "output_resume_seconds_bucket")} <= asked


def test_a_first_loss_is_an_increase() -> None:
    text, _ = cluster()
    assert value(text, "orchestrators_lost_total", {"model_name": "toy"}) == 0
    assert value(text, "output_resume_seconds_count", {"model_name": "toy"}) == 0


def test_the_text_keeps_to_the_rules_of_prometheus_and_openmetrics_is_spoken_where_it_is_asked_for(front, service):
    assert (faults(front), faults(service)) == ([], [])
    text, kind = Metrics().text("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert "# EOF" not in front
    assert "_created" not in front
    assert Metrics().text('application/openmetrics-text; version="1.0.0"')[1].startswith("text/plain")


def test_buckets_of_batches_hold_all_that_is_below_them(service: str) -> None:
    found = dict(re.findall(r'service_batch_size_bucket{le="([^"]+)"[^}]*} (\S+)', service))
    assert (found["1.0"], found["2.0"], found["128.0"], found["+Inf"]) == ("3.0", "4.0", "4.0", "5.0")
    assert "crossdraft_service_batch_size_sum" in service


def test_every_metric_is_on_the_page_and_nothing_else(front: str, service: str) -> None:
    there = {name for text in (front, service, *cluster()) for name in names(text)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix(PREFIX) for name in there}
    table = "\n".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    told = {name.split("{")[0] for name in re.findall(r"`([^`]+)`", table)}
    assert {name.replace("…", "spec_decode_num_accepted_tokens") for name in told} == families


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
    assert (stream.getvalue(), theirs.getvalue()) == ("huggingface_hub: retrying\n", "afterwards\n")


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
LOGGED = OutputRequest("", "tiny", GenerationRequest("abcabcabc", max_tokens=60, ignore_eos=True, overlap=Overlap.OFF))


async def test_a_request_is_found_in_every_services_lines() -> None:
    stream, metrics = io.StringIO(), Metrics()
    with logged(LogFormat.JSON, stream=stream):
        async with (
            await target_server(ModelOptions("bundled:target", cache_mib=128, threads=1), AT_ONCE) as target,
            ngram_server(NgramOptions(), AT_ONCE) as drafter,
        ):
            model = LocalModel("tiny", (target.address,), (NamedDrafter("copy", (drafter.address,)),))
            async with LocalBackend(model) as outputs:
                measured = MeasuredBackend(outputs, metrics)
                for name in ("req-one", "req-two"):
                    async with aclosing(measured.stream(replace(LOGGED, id=name))) as made:
                        async for _ in made:
                            log.info("the caller's own line")
    written = lines(stream)
    assert not [line for line in written if "own line" in str(line["message"]) and "request_id" in line]
    for name in ("req-one", "req-two"):
        mine = [line for line in written if line.get("request_id") == name]
        requested, ended = [text for line in mine if (text := str(line["message"])).startswith("output")]
        said = requested.partition(":")[0], ended.partition(" after")[0]
        assert said == ("output requested", "output ended (length)")
        roles = {str(line.get("session", "")).partition("-")[0] for line in mine}
        assert roles == {"", "target", "drafter"}
        opened = [line for line in mine if line["message"] == "session opened"]
        assert [line["peer"] != "" for line in opened] == [True, True]
    peers = {"role": "target", "peer": target.address}
    text = metrics.text()[0].decode()
    assert value(text, "round_trip_seconds_count", peers) >= 2
    assert value(text, "wire_bytes_total", peers | {"direction": "sent"}) > 0
    assert {labels["peer"] for labels, _ in samples(text, "wire_bytes_total")} == {target.address, drafter.address}
