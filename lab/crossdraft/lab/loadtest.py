"""`crossdraft loadtest`: sends requests to a server that runs already, or to one that it starts over services.

Where it starts them, the drafter stands behind an emulated network, whose delays are measured one after another.

Sending needs aiohttp, which the extra `http` installs: with 32 streams it hands over a chunk of a reply 1 ms after it
was sent, HTTPX after 4 ms (medians on loopback), and the moment of each token counts.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, ClassVar

from crossdraft.cli.measuring import Columns, Table
from crossdraft.cli.processes import Wanted, base_url, http_server, running
from crossdraft.cli.prompts import read, texts_of
from crossdraft.cli.running import CommandFailed, ProgressCounter, UsageError, checked_options, needs_extra
from crossdraft.client import GenerationRequest, SamplingOptions
from crossdraft.lab.commands import LoadPlan
from crossdraft.lab.harness import Benchmark, gathered, optional
from crossdraft.lab.outputs import MILLISECONDS, Output, Spread, Together, ratio
from crossdraft.lab.services import served, service
from crossdraft.session.models import requested_method
from crossdraft.types.request import Chat
from crossdraft.types.statistics import BOUNDS, Statistics
from crossdraft.verification.methods import method_named

ROLES = ("target", "drafter")
DONE = "[DONE]"
TIMED_OUT, NO_CONNECTION, BROKEN_OFF, BAD_EVENT = "timed out", "no connection", "broken off", "bad event"  # errors
LONGEST_LINE = 2**21  # bytes of a line of a stream
LONGEST_ERROR = 1000  # bytes of a refusal's body that are reported
# Compressed streams would come in blocks and not token by token.
HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "User-Agent": "crossdraft-loadtest"}
# Of `Statistics`, what servers do not send.
UNSAID = dict.fromkeys(("num_speculative_tokens", "prompt_tokens", "bytes_sent", "bytes_received"), 0)


class RequestFailedError(Exception):
    """A request failed or was refused: its kind, out of a small set to count errors by, and what happened."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


Body = dict[str, Any]  # of a request
# Of an output: for each chunk that has a token the seconds from when the server had read the request until it was made,
# as these come; then what the output cost.
Pieces = AsyncGenerator[float | Statistics, None]
Stream = Callable[[Body], Pieces]  # has an output made; closing it early cancels that. It raises RequestFailedError.


async def send(
    stream: Stream, asked: Body, timeout_seconds: float, now: Callable[[], float] = time.monotonic
) -> Output:
    """Sends a request and waits for its end, so long at most."""
    sent, error, fault = now(), "", ""
    chunks, made, figures = list[float](), list[float](), None
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(stream(asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Statistics):
                    figures = piece
                else:
                    chunks.append(now())
                    made.append(piece)
        if figures is None:
            raise RequestFailedError(BAD_EVENT, "the server does not say what the output cost: is it crossdraft's?")
    except TimeoutError:
        error, fault = TIMED_OUT, f"no end after {timeout_seconds:g} s"
    except RequestFailedError as failure:
        error, fault = failure.kind, str(failure)
    return Output(sent, tuple(chunks), now(), (), figures, tuple(made), error, fault)


@asynccontextmanager
async def http_stream(base: str, key: str = "", chat: bool = False) -> AsyncIterator[Stream]:
    """Of a server of crossdraft's by its URL without `/v1`; connections are kept, one request at a time on each.

    Requests have a `prompt`, or are chats with `messages`. Raises ImportError: there is no aiohttp."""
    import aiohttp

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=HEADERS | ({"Authorization": f"Bearer {key}"} if key else {}),
        read_bufsize=LONGEST_LINE // 2,  # a line may have twice as many
    )
    async with session:
        yield partial(_streamed, session, f"{base}/v1/{'chat/' * chat}completions")


async def _streamed(session: Any, url: str, asked: Body) -> Pieces:
    """Raises RequestFailedError."""
    import aiohttp
    from aiohttp.http_exceptions import LineTooLong

    event = ""
    try:
        async with session.post(url, json=asked, allow_redirects=False) as response:
            if response.status != 200:
                text = (await response.read())[:LONGEST_ERROR].decode("utf-8", "replace")
                raise RequestFailedError(f"HTTP {response.status}", text)
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].decode("utf-8", "replace").strip()
                if event == DONE:
                    break
                if (piece := piece_in(json.loads(event))) is not None:
                    yield piece
    except aiohttp.ClientConnectorError as error:
        raise RequestFailedError(NO_CONNECTION, f"cannot connect to {url}: {error}") from error
    except aiohttp.ClientError as error:
        text = f"the server closed the connection in the middle of its reply: {error}"
        raise RequestFailedError(BROKEN_OFF, text) from error
    except LineTooLong as error:
        raise RequestFailedError(BAD_EVENT, f"an event has a line over {LONGEST_LINE >> 20} MiB") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RequestFailedError(BAD_EVENT, f"an event means nothing ({error}): {event[:200]}") from error
    if event != DONE:
        raise RequestFailedError(BROKEN_OFF, "the stream ended without its last event")


def piece_in(said: Mapping[str, Any]) -> float | Statistics | None:
    """What an event is: a token, made so many seconds after the request was read, or what the output cost. Raises
    RequestFailedError: it is an error of the server's; ValueError, TypeError, LookupError or AttributeError: it is no
    event of crossdraft's."""
    from pydantic import TypeAdapter

    if "error" in said:
        raise RequestFailedError("error in the stream", str(said["error"]))
    trace = said.get("crossdraft") or {}
    if statistics := trace.get("statistics"):
        lanes = [lane | {"address": "", "trips": _trips(**lane)} for lane in statistics["lanes"]]
        return TypeAdapter(Statistics).validate_python(UNSAID | statistics | {"lanes": lanes})
    return float(trace["milliseconds"]) / MILLISECONDS if trace.get("kind") else None


def _trips(trip_counts: Sequence[int], trip_seconds: float, queued_seconds: float, **_: Any) -> dict[str, Any]:
    return {"counts": trip_counts, "seconds": trip_seconds, "queued_seconds": queued_seconds}


# Figures, computed from the moments of its requests.


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Communication of the orchestrator with the services of one role, over all outputs.

    A round trip goes from a question (a pass, a draft, more of a row, scores) to its first answer, without the model's
    time for that answer. It consists of queueing (the question waited for a model that was busy) and of the wire, which
    is the rest: network, gRPC, serialization on both sides, event loops.
    """

    role: str  # target or drafter
    questions: int
    questions_per_token: float
    round_trip_ms: Spread | None  # quantiles are interpolated within the bins of `types.statistics.BOUNDS`
    queueing_ms: float  # mean
    wire_ms: float  # mean
    serialization_ms_per_token: float  # in the orchestrator's process; part of the wire
    model_ms_per_token: float
    model_share: float  # in the model, of the time that sessions were open
    idle_share: float  # of that time, without a question that was not answered
    bytes_per_token: float  # serialized, both ways
    lost: int  # sessions that failed

    @staticmethod
    def of(role: str, outputs: Sequence[Statistics]) -> "Hop | None":
        """Of all sessions with services of a role; None: there are none."""
        lanes = [lane for output in outputs for lane in output.lanes if lane.role == role]
        tokens = sum(output.tokens for output in outputs)
        if not lanes:
            return None
        counts = [sum(bins) for bins in zip_longest(*(lane.trips.counts for lane in lanes), fillvalue=0)]
        bounds = [MILLISECONDS * bound for bound in BOUNDS]
        asked, opened = sum(counts), sum(lane.open_seconds for lane in lanes)
        trips, queued = sum(lane.trips.seconds for lane in lanes), sum(lane.trips.queued_seconds for lane in lanes)
        model = sum(lane.model_seconds for lane in lanes)
        return Hop(
            role=role,
            questions=asked,
            questions_per_token=share(asked, tokens),
            round_trip_ms=Spread.of_bins(counts, bounds, MILLISECONDS * trips) if asked else None,
            queueing_ms=MILLISECONDS * share(queued, asked),
            wire_ms=MILLISECONDS * share(max(0.0, trips - queued), asked),
            serialization_ms_per_token=MILLISECONDS * share(sum(lane.codec_seconds for lane in lanes), tokens),
            model_ms_per_token=MILLISECONDS * share(model, tokens),
            model_share=share(model, opened),
            idle_share=share(sum(lane.idle_seconds for lane in lanes), opened),
            bytes_per_token=share(sum(lane.bytes_sent + lane.bytes_received for lane in lanes), tokens),
            lost=sum(bool(lane.lost) for lane in lanes),
        )


@dataclass(frozen=True, kw_only=True)
class LoadRun(Together):
    """All figures under one delay. Latencies are of requests without an error."""

    delay_ms: float | None  # one way, on an emulated network; None: there is none
    requests: int
    errors: Mapping[str, int]  # by kind
    faults: Mapping[str, str]  # the text of the first one, by kind
    requests_per_second: float  # answered
    front_ms: Spread | None  # of each token: its own way from the server, and its request's way there
    places: tuple[float, ...]  # acceptance at each position of a round, given that all before were accepted
    hops: tuple[Hop, ...]

    @property
    def name(self) -> str:
        return "HTTP" if self.delay_ms is None else f"{self.delay_ms:g} ms"

    @staticmethod
    def of(delay_ms: float | None, outputs: Sequence[Output]) -> "LoadRun":
        """Of at least one output."""
        answered, failed = ([output for output in outputs if output.ok == ok] for ok in (True, False))
        seconds = max(output.ended for output in outputs) - min(output.asked for output in outputs)
        figures, total = [output.figures for output in answered if output.figures], Together.figures_of(answered)
        return LoadRun(
            **Together.fields_of(answered, seconds),
            delay_ms=delay_ms,
            requests=len(outputs),
            errors=dict(sorted(Counter(output.error or "no token" for output in failed).items())),
            faults={output.error: output.fault for output in reversed(failed) if output.error},
            requests_per_second=share(len(answered), seconds),
            front_ms=Spread.of(took for output in answered for took in output.front),
            places=total.acceptance_at[: sum(map(bool, total.judged_at))] if total else (),
            hops=tuple(hop for role in ROLES if (hop := Hop.of(role, figures))),
        )


def share(part: float, whole: float) -> float:
    return ratio(part, whole) or 0.0


# Tables, a column for each configuration. The first names are those of `vllm bench serve`.

SEEN: Columns = {
    "what clients see (mean / p50 / p90 / p99)": lambda run: run.name,
    "Requests": lambda run: run.requests,
    "Failed requests": lambda run: sum(run.errors.values()),
    "Benchmark duration (s)": lambda run: f"{run.seconds:.2f}",
    "Total generated tokens": lambda run: run.tokens,
    "Request throughput (req/s)": lambda run: f"{run.requests_per_second:.2f}",
    "Output token throughput (tok/s)": lambda run: f"{run.tokens_per_second:.2f}",
    "TTFT (ms)": lambda run: run.first_token_ms or "",
    "TPOT (ms)": lambda run: run.per_token_ms or "",
    "ITL (ms)": lambda run: run.between_chunks_ms or "",
    "E2EL (ms)": lambda run: run.end_to_end_ms or "",
    "client to server and back, ms": lambda run: run.front_ms or "",
    "tokens per pass": lambda run: optional(run.tokens_per_pass, ".2f"),
    "acceptance": lambda run: optional(run.acceptance, ".1%"),
    "acceptance by position": lambda run: " ".join(f"{place:.0%}" for place in run.places[:6]),
}
HOP: Columns = {
    "round trip, ms": lambda hop: hop.round_trip_ms or "",
    "of it queueing, ms": lambda hop: f"{hop.queueing_ms:.2f}",
    "of it wire, ms": lambda hop: f"{hop.wire_ms:.2f}",
    "questions a token": lambda hop: f"{hop.questions_per_token:.2f}",
    "serialization, ms a token": lambda hop: f"{hop.serialization_ms_per_token:.3f}",
    "model, ms a token": lambda hop: f"{hop.model_ms_per_token:.2f}",
    "time in the model": lambda hop: f"{hop.model_share:.0%}",
    "time idle": lambda hop: f"{hop.idle_share:.0%}",
    "bytes a token": lambda hop: f"{hop.bytes_per_token:,.0f}",
    "sessions lost": lambda hop: hop.lost,
}


# The test.

# Of each stage: its delay in ms, one way, or None where nothing is emulated; how an output is asked for.
Stages = AsyncGenerator[tuple[float | None, Stream], None]


class LoadTest(Benchmark[LoadPlan, LoadRun]):
    """A test."""

    unit: ClassVar[str] = "requests"

    @cached_property
    def prompts(self) -> tuple[Body, ...]:
        """Fields of requests, in turns; raises UsageError. Unless chats are sent, prompts are what their messages say:
        a model without a chat template has no others."""
        with checked_options():
            if not self.plan.chat:
                return tuple({"prompt": text} for text in texts_of(self.plan.prompts))
            return tuple({"messages": _messages(prompt.content)} for prompt in read(self.plan.prompts))

    @cached_property
    def like(self) -> Body:
        """What all requests have in common; raises UsageError if no server would take it."""
        plan, k = self.plan, self.plan.num_speculative_tokens
        forced: dict[str, Any] = {} if k is None else {"overlap": "off", "num_speculative_tokens": k}
        with checked_options():
            sampling = SamplingOptions(plan.temperature)
            requested_method(
                GenerationRequest("x", method=plan.method, max_tokens=plan.max_tokens, options=sampling, **forced)
            )
        speculative = _given(trace=True, method=plan.method, drafter=plan.use_drafter, **forced)
        return _given(
            model=plan.model or None,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            ignore_eos=plan.ignore_eos,
            stream=True,
            speculative=speculative,
        )

    def requests(self, count: int) -> Iterator[Body]:
        """The prompts take turns, and seeds follow the first one, if a method is named that takes one."""
        plan = self.plan
        seeded = plan.method is not None and plan.temperature > 0 and method_named(plan.method).samples
        for number in range(count):
            seed = {"seed": plan.seed + number} if seeded else {}
            yield {**self.like, **self.prompts[number % len(self.prompts)], **seed}

    @property
    def delays(self) -> tuple[float, ...]:
        """To the drafter, in ms, one way."""
        return self.plan.services.delay_ms or (0.0,)

    @cached_property
    def models(self) -> tuple[Wanted, Wanted]:
        """Target and drafter that are started; raises UsageError."""
        given = self.plan.services
        return (
            served("target", given.target_model, given.engine, given.pace_target),
            served("drafter", given.drafter_model, given.engine, given.pace_drafter),
        )

    @property
    def total(self) -> int:
        return len(self.delays) * self.plan.requests

    def described(self) -> dict[str, Any]:
        """Without address and key."""
        return {name: value for name, value in super().described().items() if name not in ("url", "api_key")}

    def check(self) -> None:
        if self.plan.url:
            base_url(self.plan.url)
            if self.plan.services.delay_ms:
                raise UsageError("--delay-ms needs services that this command starts: leave out --url")
        _ = self.models, self.prompts, self.like  # which raise UsageError

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[LoadRun, None]:
        async with aclosing(self.stages()) as stages:
            async for delay_ms, stream in stages:
                if self.plan.warm_up:
                    advance(0, "warm-up")
                    outputs = await self._made(stream, self.plan.warm_up, lambda: None)
                    if not any(output.ok for output in outputs):
                        error, fault = outputs[0].error, outputs[0].fault
                        raise CommandFailed(f"the first requests failed ({error}): {fault or 'no token came'}")
                advance(0, "" if delay_ms is None else f"{delay_ms:g} ms")
                yield LoadRun.of(delay_ms, await self._made(stream, self.plan.requests, advance))

    async def _made(self, stream: Stream, count: int, advance: Any) -> list[Output]:
        """The first `count` requests."""

        async def sent(asked: Body) -> Output:
            output = await send(stream, asked, self.plan.timeout)
            advance()
            return output

        return await gathered(sent, self.requests(count), self.plan.clients)

    async def stages(self) -> Stages:
        """One of a server that runs already, or one for each delay to the drafter, each with a server of its own, over
        services that run throughout; raises CommandFailed."""
        try:
            if self.plan.url:
                async with http_stream(base_url(self.plan.url), self.plan.api_key, self.plan.chat) as stream:
                    yield None, stream
                return
            async with (
                service(self.models[0], 0, False) as (target, _),
                service(self.models[1], 1, any(self.delays)) as (drafter, link),
            ):
                for delay in self.delays:
                    if link is not None:
                        await link.delay(delay)
                    server = http_server(target, drafter, self.plan.clients)
                    async with (
                        running([server]) as (front,),
                        http_stream(f"http://{front.address}", chat=self.plan.chat) as stream,
                    ):
                        yield delay if any(self.delays) else None, stream
        except ImportError as error:
            raise CommandFailed(f"a load test {needs_extra('http')}") from error

    def report(self, results: Sequence[LoadRun]) -> Iterator[Table | str]:
        yield Table.of(results, SEEN).turned()
        for role in ROLES:
            found = [(run.name, hop) for run in results for hop in run.hops if hop.role == role]
            columns: Columns = {name: lambda pair, of=of: of(pair[1]) for name, of in HOP.items()}  # type: ignore[misc]
            if found:
                yield Table.of(found, {f"orchestrator and {role}": lambda pair: pair[0], **columns}).turned()
        for run in results:
            if run.errors:
                counted = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
                said = "; ".join(f"{kind}: {text}" for kind, text in sorted(run.faults.items()))
                yield f"{run.name}: {sum(run.errors.values())} of {run.requests} requests failed: {counted}. {said}"

    def finish(self, results: Sequence[LoadRun]) -> None:
        if not any(run.requests > sum(run.errors.values()) for run in results):
            raise CommandFailed("no request was answered")


def _messages(content: str | Chat) -> list[Body]:
    """As the API has them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [{"role": message.role, "content": message.content, **message.more} for message in content.messages]


def _given(**fields: Any) -> Body:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
