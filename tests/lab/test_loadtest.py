"""`crossdraft loadtest`: what is asked, of whom, in which words; streams over HTTP, from a server that says what it is
told to; clients at once in simulated time; figures of timelines that were written by hand; a real test.
"""

import asyncio
import json
import socket
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from crossdraft.cli.processes import base_url
from crossdraft.cli.prompts import NO_CATEGORY, Prompt, prompts_of, read, texts_of
from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.lab import loadtest
from crossdraft.lab.commands import LoadPlan
from crossdraft.lab.harness import gathered
from crossdraft.lab.loadtest import LoadRun, LoadTest, RequestFailedError, Stages, Stream, http_stream, send
from crossdraft.lab.outputs import Output, Spread
from crossdraft.serving.http.responses import figures_of
from crossdraft.types.messages import Pass, PassDone
from crossdraft.types.request import Chat, Message
from crossdraft.types.statistics import BOUNDS, COARSE, LaneFigures, Trips
from crossdraft.types.trees import TokenTree
from tests.cli.conftest import Cli
from tests.client.test_measurements import measured
from tests.lab.conftest import figures
from tests.rpc.clock import HANGS, now, simulated

# Outputs whose figures can be worked out by hand. Times are seconds.
TRIPS = (*(4 if bound == 0.005 else 0 for bound in BOUNDS), 0)  # four of 2.5 to 5 ms
TARGET = LaneFigures("target", "", 100, 300, Trips(TRIPS, 0.016, 0.004), "", 0.4, 0.002, 1.0, 0.5)
DRAFTER = LaneFigures("drafter", "", 50, 150, Trips(TRIPS, 0.014), "unreachable", 0.1, 0.001, 0.8, 0.2)
COST = figures(
    tokens=4, passes=2, accepted=2, corrected=1, judged_at=(2, 1), accepted_at=(2, 0), lanes=(TARGET, DRAFTER)
)
# Asked at 10; tokens after 0.1, 0.2, 0.2 and 0.4 s; its end 0.1 s after the last.
WHOLE = Output(asked=10.0, moments=(10.1, 10.2, 10.2, 10.4), ended=10.5, made=(0.09, 0.18, 0.18, 0.37), figures=COST)
FAILED = replace(WHOLE, asked=11.0, moments=(), ended=12.5, made=(), error="HTTP 429", fault="no room", figures=None)


# Figures.


def summary_of(*outputs: Output) -> LoadRun:
    return LoadRun.of(None, outputs)


def near(found: Spread | None, *wanted: float) -> None:
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p99) == pytest.approx(wanted)


def test_latencies_of_one_request() -> None:
    found = summary_of(WHOLE)
    near(found.first_token_ms, 1, *[100] * 4)
    near(found.between_chunks_ms, 3, 100, 100, 180, 198)  # 100, 0 and 200
    near(found.per_token_ms, 1, *[100] * 4)  # 300 for three
    near(found.end_to_end_ms, 1, *[500] * 4)
    near(found.front_ms, 4, 20, 20, 27, 29.7)  # 10, 20, 20 and 30
    assert (found.requests, found.errors, found.tokens) == (1, {}, 4)
    assert (found.seconds, found.tokens_per_second, found.requests_per_second) == pytest.approx((0.5, 8, 2))


def test_errors_are_counted_by_kind_and_have_no_latencies() -> None:
    cut = replace(WHOLE, asked=10.5, error="broken off")
    silent = replace(WHOLE, moments=(), made=())
    found = summary_of(WHOLE, FAILED, cut, silent)
    assert found.errors == {"HTTP 429": 1, "broken off": 1, "no token": 1}
    near(found.end_to_end_ms, 1, *[500] * 4)
    assert (found.tokens, found.seconds) == (4, pytest.approx(2.5))  # until the end of the one that failed
    nothing = summary_of(FAILED)
    assert (nothing.first_token_ms, nothing.acceptance, nothing.hops, nothing.tokens_per_second) == (None, None, (), 0)


def test_a_single_token_has_no_time_per_token() -> None:
    short = replace(WHOLE, moments=(10.1,), made=(), figures=replace(COST, tokens=1))
    found = summary_of(short)
    assert (found.per_token_ms, found.between_chunks_ms, found.front_ms) == (None, None, None)


def test_acceptance_is_of_all_outputs_together() -> None:
    other = replace(WHOLE, figures=replace(COST, judged_at=(2, 2, 1), accepted_at=(1, 1, 0), accepted=4))
    found = summary_of(WHOLE, other)
    assert (found.acceptance, found.tokens_per_pass) == (6 / 8, 2.0)
    assert found.places == (3 / 4, 1 / 3, 0.0)


def test_hops_say_where_round_trips_went() -> None:
    target, drafter = summary_of(WHOLE, WHOLE).hops
    assert (target.role, target.questions, target.questions_per_token) == ("target", 8, 1.0)
    near(target.round_trip_ms, 8, 4, 4.875, 4.975, 4.9975)
    assert (target.queueing_ms, target.wire_ms) == pytest.approx((1.0, 3.0))
    assert (target.model_share, target.idle_share) == pytest.approx((0.4, 0.5))
    assert (target.serialization_ms_per_token, target.model_ms_per_token) == pytest.approx((0.5, 100))
    assert (target.bytes_per_token, target.lost) == (100.0, 0)
    assert (drafter.role, drafter.lost, drafter.queueing_ms) == ("drafter", 2, 0.0)


def test_a_lane_without_questions_has_no_round_trip() -> None:
    idle = replace(TARGET, trips=Trips())
    found = summary_of(replace(WHOLE, figures=replace(COST, lanes=(idle,)))).hops
    assert [(hop.role, hop.questions, hop.round_trip_ms) for hop in found] == [("target", 0, None)]


def test_a_spread_of_known_values() -> None:
    assert Spread.of(one / 1000 for one in range(101)) == Spread(101, *map(pytest.approx, (50.0, 50.0, 90.0, 99.0)))
    assert Spread.of([0.002]) == Spread(1, 2.0, 2.0, 2.0, 2.0)
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("counts", "median"), [((0, 4, 0, 0), 2.0), ((2, 2, 0, 0), 1.0), ((1, 0, 3, 0), 3 + 2 / 3), ((0, 0, 0, 3), 5.0)]
)
def test_quantiles_of_bins_are_linear_within_a_bin(counts: tuple[int, ...], median: float) -> None:
    assert Spread.of_bins(counts, [1.0, 3.0, 5.0], 1.0).p50 == pytest.approx(median)


@pytest.mark.parametrize("seconds", [0.00011, 0.0007, 0.0013, 0.0101, 0.045, 0.0525, 0.101, 0.3, 0.97])
def test_round_trips_that_all_took_as_long_are_said_to_have_taken_about_as_long(seconds: float) -> None:
    happened: list[tuple[object, float]] = []
    for number in range(6):
        happened += [(Pass(number, (), TokenTree()), 0.0), (PassDone(number, (), 0.0), seconds)]
    trips = measured("target", *happened).figures(99.0).trips
    found = Spread.of_bins(trips.counts, BOUNDS, 6 * seconds)
    assert [found.p50, found.p90, found.p99] == pytest.approx([seconds] * 3, rel=0.15)
    assert trips.coarse[bisect_left(COARSE, seconds)] == sum(trips.coarse) == 6
    assert len(trips.coarse) == len(COARSE) + 1


# Streams.

REQUEST = {"prompt": "def f(", "max_tokens": 8}


def event(value: object) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def token(text: str, milliseconds: float) -> bytes:
    trace = {"kind": "accepted", "milliseconds": milliseconds}
    return event({"choices": [{"text": text}], "crossdraft": trace})


END = event({"choices": [{"text": ""}], "crossdraft": {"milliseconds": 9.0, "statistics": figures_of(COST)}})
DONE = event("[DONE]")
STREAM = (token("a", 2.5), token("", 5.0), END, DONE)


class Server:
    """Answers each request with pieces, in chunks; if these are not the whole, it closes the connection, or waits until
    the client does."""

    def __init__(self, *pieces: bytes, status: int = 200, keep: bool = True, whole: bool = True) -> None:
        self.pieces, self.status, self.keep, self.whole = pieces, status, keep, whole
        self.asked: list[tuple[str, object]] = []  # key and body
        self.gone = asyncio.Event()  # a client has closed its connection

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.headers.get("Authorization", ""), await request.json()))
        reply = web.StreamResponse(status=self.status)
        await reply.prepare(request)
        for piece in self.pieces:
            await reply.write(piece)
        if not self.keep:
            assert request.transport is not None
            request.transport.close()
        elif not self.whole:
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()
        return reply


@asynccontextmanager
async def asking(server: Server, key: str = "") -> AsyncIterator[Stream]:
    application = web.Application()
    application.router.add_post("/v1/completions", server.answer)
    async with TestServer(application) as at, http_stream(f"http://{at.host}:{at.port}", key) as client:
        yield client


async def answered(server: Server, key: str = "") -> Output:
    async with asking(server, key) as client:
        return await send(client, REQUEST, HANGS)


async def test_a_stream_with_a_trace() -> None:
    server = Server(*STREAM)
    found = await answered(server, "secret")
    assert (found.made, found.figures, found.error) == ((0.0025, 0.005), COST, "")
    assert server.asked == [("Bearer secret", REQUEST)]


async def test_events_may_be_cut_anywhere() -> None:
    whole = b": a comment\r\n\r\n" + b"".join(STREAM[:-1]).replace(b"\n", b"\r\n") + DONE + b"data"
    for size in (1, 7, 64):
        found = await answered(Server(*(whole[begin : begin + size] for begin in range(0, len(whole), size))))
        assert (len(found.moments), found.figures) == (2, COST)


async def test_a_stream_that_is_left_early_is_closed() -> None:
    server = Server(*STREAM[:2], b"data: more", whole=False)
    async with asking(server) as client, aclosing(client(REQUEST)) as stream:
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(HANGS):
            await server.gone.wait()


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Server(b'{"error": "no room"}', status=429), "HTTP 429", "no room"),
        (lambda: Server(*STREAM[:2], keep=False, whole=False), "broken off", "closed the connection"),
        (lambda: Server(*STREAM[:2]), "broken off", "without its last event"),
        (lambda: Server(event({"error": {"message": "gone"}})), "error in the stream", "gone"),
        (lambda: Server(event("nonsense")), "bad event", "means nothing"),
        (lambda: Server(event([1])), "bad event", "means nothing"),
        (lambda: Server(event({"crossdraft": {"statistics": {"passes": 1}}})), "bad event", "means nothing"),
        (lambda: Server(event("x" * 2**12), DONE), "bad event", "an event has a line over"),
        (lambda: Server(event({"choices": [{"text": "Hi"}]}), DONE), "bad event", "is it crossdraft's"),
    ],
)
async def test_what_goes_wrong_has_a_kind(
    make: Callable[[], Server], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadtest, "LONGEST_LINE", 2**10)
    found = await answered(make())
    assert found.error == kind
    assert text in found.fault


async def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound, and nobody listens: a connection is refused
        taken.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with http_stream(base) as client:
            found = await send(client, REQUEST, HANGS)
    assert found.error == "no connection"
    assert f"cannot connect to {base}" in found.fault


@pytest.mark.parametrize(
    ("url", "base"),
    [
        *(("http://a:8000", "http://a:8000"), ("http://a/v1/", "http://a"), ("http://[::1]:9", "http://[::1]:9")),
        ("https://a/under/v1", "https://a/under"),
        *((url, "") for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a?b=c", "http://a:99999", "http://[")),
        ("http://me:x@a", ""),
    ],
)
def test_urls(url: str, base: str) -> None:
    with nullcontext() if base else pytest.raises(UsageError, match="--url must be such as"):
        assert base_url(url) == base


@dataclass
class Timed:
    """Makes two tokens, each after `each` seconds."""

    each: float = 1.0
    failing: dict[str, Exception] = field(default_factory=dict)
    under_way: int = 0
    ended: int = 0

    async def stream(self, asked: loadtest.Body) -> loadtest.Pieces:
        prompt = str(asked["prompt"])
        self.under_way += 1
        try:
            for _ in range(2):
                await asyncio.sleep(self.each)
                if prompt in self.failing:
                    raise self.failing[prompt]
                yield 0.25
            yield replace(COST, tokens=2)
        finally:
            self.under_way -= 1
            self.ended += 1


@simulated
async def asked_of(server: Timed, at_once: int, seconds: float = 100.0) -> list[Output]:
    requests = [{"prompt": one} for one in "abcdef"]
    found = await gathered(lambda one: send(server.stream, one, seconds, now), requests, at_once)
    assert server.ended == 6
    return found


def test_clients_ask_again_when_they_have_their_answer() -> None:
    found = asked_of(Timed(), 2)
    assert [one.asked for one in found] == [0, 0, 2, 2, 4, 4]
    assert [one.moments for one in found][2] == (3, 4)
    assert [one.per_token for one in found] == [1.0] * 6


def test_what_fails_is_written_down_and_the_others_go_on() -> None:
    found = asked_of(Timed(failing={"b": RequestFailedError("HTTP 429", "no room")}), 1)
    assert [(one.error, one.fault) for one in found] == [("", ""), ("HTTP 429", "no room"), *[("", "")] * 4]
    assert (found[1].moments, found[1].ended, found[1].ok) == ((), 3.0, False)


def test_a_request_without_an_end_is_given_up() -> None:
    found = asked_of(Timed(each=8.0), 6, seconds=10.0)
    assert {(one.error, one.moments, one.ended) for one in found} == {(loadtest.TIMED_OUT, (8.0,), 10.0)}


def test_a_fault_of_the_client_itself_ends_the_test() -> None:
    server = Timed(failing={"c": ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        asked_of(server, 2)
    assert server.under_way == 0


# The test.

DELAY = 3  # ms, one way
LATENCIES = ("first_token_ms", "between_chunks_ms", "per_token_ms", "end_to_end_ms", "front_ms")


@pytest.mark.full
def test_started_services_behind_a_delay(cli: Cli, tmp_path: Path, target_folder: Path, drafter_folder: Path) -> None:
    models = "--target-model", target_folder, "--drafter-model", drafter_folder, "--delay-ms", DELAY
    load = "--clients", 2, "--requests", 3, "--warm-up", 1, "--max-tokens", 8, "--ignore-eos"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def f("}\n{"turns": ["Say"]}\n')
    report = tmp_path / "report.json"
    done = cli("loadtest", *models, *load, "--prompts", prompts, "--json", report)
    assert done.code == 0, done.err
    (found,) = json.loads(report.read_text())["results"]
    assert "orchestrator and target" in done.out
    # Every figure is there, and a drafter, which short outputs may not want, is as far away as was asked for.
    assert (found["requests"], found["errors"], found["tokens"]) == (3, {}, 24)
    assert all(found[name]["count"] > 0 for name in LATENCIES)
    assert found["tokens_per_pass"] >= 1
    assert found["between_chunks_ms"]["count"] == 3 * 7
    target, *drafters = found["hops"]
    assert [target["role"], *(one["role"] for one in drafters)] in (["target"], ["target", "drafter"])
    assert target["questions"] >= 3
    assert [one for one in drafters if one["questions"] and one["wire_ms"] < 2 * DELAY] == []  # it may not be asked
    assert target["bytes_per_token"] > 0
    assert 0 < target["model_share"] <= 1
    assert 0 <= target["idle_share"] < 1
    assert target["serialization_ms_per_token"] > 0


def answering(count: int) -> Stream:
    """A server that answers at once, with two chunks of four tokens in all, and refuses all requests but so many."""
    left = iter(range(count))

    async def stream(_: loadtest.Body) -> loadtest.Pieces:
        if next(left, None) is None:
            raise RequestFailedError("HTTP 429", "no room")
        yield 0.0
        yield 0.0
        yield COST

    return stream


def run(monkeypatch: pytest.MonkeyPatch, stream: Stream, file: Path | None = None, **plan: Any) -> None:
    """Two stages of a server."""

    async def stages(_: LoadTest) -> Stages:
        for delay in (0.0, 5.0):
            yield delay, stream

    monkeypatch.setattr(LoadTest, "stages", stages)
    LoadTest(LoadPlan(clients=2, requests=3, **plan)).run(file)


def test_stages_are_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    run(monkeypatch, answering(10), report, api_key="secret", url="http://there")
    assert "secret" not in report.read_text()
    assert "there" not in report.read_text()
    found = json.loads(report.read_text())["results"]
    assert [(one["delay_ms"], one["requests"]) for one in found] == [(0, 3), (5, 3)]
    shown = capsys.readouterr().out
    for wanted in (
        *("| 0 ms | 5 ms |", "Failed requests", "TTFT (ms)", "E2EL (ms)", "Output token throughput (tok/s)", "66.7%"),
        *("100% 0%", "orchestrator and target", "orchestrator and drafter"),
        "| 4.00 / 4.88 / 4.97 / 5.00 |",  # round trip
    ):
        assert wanted in shown, wanted


def test_what_fails_is_counted_and_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, answering(3), warm_up=0)
    assert "\n0 ms: " not in (shown := capsys.readouterr().out)
    assert "5 ms: 3 of 3 requests failed: 3 HTTP 429. HTTP 429: no room" in shown


@pytest.mark.parametrize(
    ("warm_up", "complaint"), [(2, "the first requests failed .HTTP 429.: no room"), (0, "no request was answered")]
)
def test_a_test_without_an_answer_fails(warm_up: int, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandFailed, match=complaint):
        run(monkeypatch, answering(0), warm_up=warm_up)


def test_a_server_that_is_not_there(cli: Cli) -> None:
    cli("loadtest", "--url", "http://127.0.0.1:9", "--requests", 1).failed("the first requests failed", 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--method", "nonsense"], "nonsense"),
        (["--temperature", "-1"], "temperature"),
        (["--delay-ms", "a"], "--delay-ms must be a number"),
        (["--pace-target", "fast"], "a pace is A,B"),
        (["--prompts", "/nowhere"], "cannot read the prompts"),
        (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (["--url", "nowhere"], "--url must be such as"),
        (["--url", "http://a", "--delay-ms", "0"], "--delay-ms needs services that this command starts"),
    ],
)
def test_wrong_options(cli: Cli, options: list[str], complaint: str) -> None:
    cli("loadtest", *options).failed(complaint)


def asked(count: int, prompts: tuple[str, ...] = ("def f(",), **given: Any) -> list[dict[str, Any]]:
    test = LoadTest(LoadPlan(**given))
    test.prompts = tuple({"prompt": one} for one in prompts)
    return list(test.requests(count))


def test_what_is_asked_for() -> None:
    same = {"max_tokens": 32, "temperature": 0.7, "model": "big", "ignore_eos": True}
    speculative = {"method": "seeded", "drafter": "small", "trace": True}
    assert asked(4, method="seeded", use_drafter="small", seed=100, **same)[3] == same | {
        **{"stream": True, "prompt": "def f(", "seed": 103, "speculative": speculative}
    }


def test_drafting_can_be_forced() -> None:
    (forced,) = asked(1, num_speculative_tokens=4)
    assert forced["speculative"] == {"trace": True, "overlap": "off", "num_speculative_tokens": 4}
    with pytest.raises(UsageError, match="num-speculative-tokens"):
        asked(1, num_speculative_tokens=0)
    assert asked(1, use_drafter="none")[0]["speculative"] == {"trace": True, "drafter": "none"}


@pytest.mark.parametrize(("method", "seed"), [("slem", 5), ("coupled", None), (None, None)])
def test_outputs_are_seeded_where_their_method_is_named_and_takes_a_seed(method: str | None, seed: int | None) -> None:
    assert asked(3, method=method, temperature=1.0, seed=3)[2].get("seed") == seed


def test_prompts_take_turns() -> None:
    assert [one["prompt"] for one in asked(5, ("a", "b"))] == ["a", "b", "a", "b", "a"]


def test_chats_go_to_the_chat_endpoint_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"text": "Hi"}\n{"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]}'
    )
    hi, both = LoadTest(LoadPlan(prompts=file, chat=True)).requests(2)
    assert hi["messages"] == [{"role": "user", "content": "Hi"}]
    assert both["messages"] == [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    assert "prompt" not in hi
    assert [one["prompt"] for one in LoadTest(LoadPlan(prompts=file)).requests(2)] == ["Hi", "A\n\nB"]


def test_the_bundled_prompts_have_six_categories_by_turns() -> None:
    """The first six are one of each."""
    found = read()
    assert len({one.content for one in found}) == 36
    assert all(isinstance(one.content, Chat) and one.content.messages[-1].role == "user" for one in found)
    assert len({one.category for one in found[:6]}) == 6


def test_files_of_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"file": "a.py", "text": "def f("}\n\n'
        '{"question_id": 81, "category": "qa", "turns": ["Why?", "And then?"]}\n'
        '{"category": "qa", "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "W"}]}'
    )
    why, short = Message("user", "Why?"), (Message("system", "Be short."), Message("user", "W"))
    assert read(file) == (Prompt(NO_CATEGORY, "def f("), Prompt("qa", Chat((why,))), Prompt("qa", Chat(short)))
    assert texts_of(file) == ("def f(", "Why?", "Be short.\n\nW")
    with pytest.raises(UsageError, match="has chats"):
        prompts_of(file, None)
    file.write_bytes(b'\xef\xbb\xbf{"text": "a", "file": "f"}\r\n\r\n{"text": "b"}\n{"text": "c"}\n')  # as on Windows
    assert [[one.content for one in prompts_of(file, most)] for most in (2, None)] == [["a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2 is no prompt"),
        ('{"turns": []}', "line 1 is no prompt"),
        ('{"text": ""}', "its text is empty, or there is none"),
        ("text", "line 1 is no prompt"),
        ('{"messages": []}', "the chat has no messages"),
        ("[1]", "line 1 is no prompt"),
        ('{"text": ' + "[" * 100_000, "line 1 is no prompt"),
        ('{"text": "\\ud800"}', "line 1 is no prompt .its text has half of a surrogate pair"),
    ],
)
def test_what_is_no_prompt(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read(file)
    file.write_bytes(b"\xff")
    for unreadable in (file, tmp_path / "elsewhere"):
        with pytest.raises(UsageError, match="cannot read the prompts"):
            prompts_of(unreadable, None)
