"""`crossdraft bench throughput`: many outputs at once, beside transformers' own generation on the same models.

Each model has one process and one thread of torch unless more are asked for; on a CPU the target has the first core,
the drafter the second one, and this process runs where there is room. What is compared with has the target's core.
Where models are on another device nobody is bound to a core. Ways take turns, one running while the others are idle.
"""

import asyncio
import os
import time
from asyncio import Task, TaskGroup
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol
from urllib.request import urlopen

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from crossdraft.bench.harness import markdown, on_core, processor_seconds, rotated, write_json, write_text
from crossdraft.bench.made_up_models import lengthened
from crossdraft.bench.transformers_peer import ASSISTED, BATCHED, Made, Question, TransformersProcess, ask
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.console.processes import Running, Startable, Wanted, running
from crossdraft.console.running import (
    STARTS_PROCESSES,
    CommandFailed,
    Misused,
    check_output,
    checked_options,
    run_to_end,
)
from crossdraft.console.running import counted as counted_of_running
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest
from crossdraft.loadtest.summary import Spread
from crossdraft.rpc.metrics import PREFIX
from crossdraft.rpc.server import freeze_heap

CROSSDRAFT, PLAIN, GENERATE_BATCH, ASSISTED_WAY = WAYS = ("crossdraft", "plain", "generate_batch", "assisted")
SHIFT = 8  # tokens that a prompt begins later with each time that its text is used again
SHORTEST = 8  # tokens of a prompt
FEWEST = 4  # outputs of a run


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: str  # a model's name
    drafter: str
    ways: tuple[str, ...]  # of WAYS
    at_once: tuple[int, ...]  # outputs under way together; each in turn
    each: int  # outputs that follow each other in each place
    repeat: int
    tokens: int  # of each output
    prompt_tokens: int  # of the target, at most
    texts: tuple[str, ...]
    temperature: float
    method: str | None  # None: the default for the temperature
    mib: int  # for keys and values of the target
    threads: tuple[int, ...]  # of transformers; each is a way of its own
    dtype: str = "float32"
    device: str = "cpu"  # of all models
    enforce_eager: bool = False  # of ours

    @property
    def warm_ups(self) -> tuple[tuple[int, int], ...]:
        """Outputs at once and tokens of each, for ours: elsewhere than on a CPU each shape of a forward that is new
        costs time, and so all that is measured is done once before."""
        if self.device == "cpu":
            return ((ALONE, WARM_UP),)
        return tuple((count, max(WARM_UP, self.tokens // 2)) for count in self.at_once)

    def core(self, number: int) -> tuple[str, ...]:
        """What a model's command is run by."""
        return on_core(number) if self.device == "cpu" else ()

    def outputs(self, at_once: int) -> int:
        """Of one run."""
        return max(FEWEST, at_once * self.each)

    def check(self) -> None:
        """Raises Misused if a value is out of its range."""
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown or not self.ways:
            raise Misused(f"--way is one of {', '.join(WAYS)}, got {', '.join(unknown) or 'none'}")
        if not self.texts or min(self.at_once, default=0) < 1:
            raise Misused("give at least one prompt, and 1 or more outputs at once (--concurrency)")
        with checked_options():
            self.request()

    def request(self) -> GenerationRequest:
        """One output, whatever its prompt; raises ValueError."""
        options = SamplingOptions(self.temperature)
        return GenerationRequest("x", self.method, max_tokens=self.tokens, options=options, ignore_eos=True)


def concurrencies_of(text: str) -> tuple[int, ...]:
    """From numbers with commas between them; raises Misused."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise Misused(f"--concurrency takes numbers such as 1,4,16, got {text!r}") from error


# The ways that `crossdraft bench throughput` compares, each of which makes many outputs at once.

Ids = tuple[int, ...]


def prompts_of(texts: Sequence[Ids], count: int, longest: int) -> list[Ids]:
    """`count` prompts of at most `longest` tokens, no two with the same beginning: a text that is used again begins
    later. Raises Misused if there are too few."""
    found: list[Ids] = []
    for turn in range(1 + count // len(texts)):
        later = [ids[SHIFT * turn :][:longest] for ids in texts]
        found += [ids for ids in later if len(ids) >= SHORTEST]
    if len(found) < count:
        raise Misused(f"the prompts are enough for {len(found)} outputs, and {count} are asked for: give more prompts")
    return found[:count]


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures all ways with each number of outputs at once; a table on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a process does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    plan.check()
    run_to_end(_measure(plan, json_path, markdown_path), STARTS_PROCESSES)


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    found: list[Measured] = []
    async with AsyncExitStack() as stack:
        stage = await Stage.set_up(plan, stack)
        with counted_of_running(len(plan.at_once) * plan.repeat * len(stage.ways), "runs") as advance:
            most = prompts_of(stage.texts, plan.outputs(max(plan.at_once)), plan.prompt_tokens)
            for way in stage.ways:
                await way.warm_up(most)
            for at_once in plan.at_once:
                runs: dict[Way, list[Run]] = {way: [] for way in stage.ways}
                for turn in range(plan.repeat):
                    for place in rotated(len(stage.ways), turn):
                        way = stage.ways[place]
                        runs[way].append(await way.run(most[: plan.outputs(at_once)], plan.tokens, at_once))
                        advance()
                found += figures_of(runs, at_once, plan)
                _write(found, plan, json_path, markdown_path)  # each time: it may be broken off
    print(report(found, _conditions(plan)), end="")


# From outputs that were made at once to figures: tokens a second, latencies, who was busy. Pure.


@dataclass(frozen=True)
class Measured:
    """One way with so many outputs at once, over all its runs."""

    way: str
    at_once: int
    outputs: int
    tokens: int
    seconds: float
    tokens_per_second: float
    streaming: float | None  # tokens/s while all outputs were under way and had begun; None: there was no such time
    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each output: from its first token to its last, for each token after the first
    gap_ms: Spread | None  # between any two tokens of an output; those of one pass come together
    end_to_end_ms: Spread | None
    tokens_per_pass: float | None
    acceptance: float | None  # of the judged tokens; None: none was judged
    sessions: float | None  # in a forward of the target, the mean
    fed: float | None  # tokens in a forward, the mean
    busy: float | None  # share of the time that the target was in forwards and draws
    target_cores: float  # processor seconds a second
    drafter_cores: float
    here_cores: float
    loop_cores: float
    here_ms: float  # processor time of this process for a token
    tokens_per_target_second: float  # of its processor: what a busy machine changes least
    same: int | None  # outputs with the ids that the way compared with has; None: nothing to compare


def _write(found: Sequence[Measured], plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    if markdown_path is not None:
        write_text(markdown_path, report(found, _conditions(plan)))
    if json_path is not None:
        shown = asdict(replace(plan, texts=())) | {"texts": len(plan.texts)}
        write_json(json_path, {"plan": shown, "measured": [asdict(one) for one in found]})


@dataclass(frozen=True)
class Model:
    """What the target's service counts, or the difference of two such counts."""

    steps: float = 0.0  # forwards
    jobs: float = 0.0  # of sessions, over all forwards
    tokens: float = 0.0  # fed
    seconds: float = 0.0  # in forwards and draws

    def since(self, before: "Model") -> "Model":
        """What was counted after an earlier count."""
        return Model(
            self.steps - before.steps,
            self.jobs - before.jobs,
            self.tokens - before.tokens,
            self.seconds - before.seconds,
        )


@dataclass(frozen=True)
class Spent:
    """Processor seconds."""

    target: float  # of its process
    drafter: float = 0.0
    here: float = 0.0  # of the process that runs the orchestrator and measures
    loop: float = 0.0  # ... of its event loop's thread


@dataclass(frozen=True)
class Run:
    """All outputs of one way that were made together."""

    outputs: tuple[Made, ...]
    seconds: float
    spent: Spent
    model: Model = Model()
    statistics: tuple[Statistics, ...] = ()  # empty: not ours


class Way(Protocol):
    """What makes outputs."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """Before anything is measured."""
        ...

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """An output for each prompt; raises CommandFailed."""
        ...


def figures_of(runs: dict[Way, list[Run]], at_once: int, plan: Plan) -> list[Measured]:
    """Of all ways with so many outputs at once; greedy outputs are compared with those of continuous batching."""
    compared = [way for way in runs if way.name.startswith(GENERATE_BATCH)] if plan.temperature == 0 else []
    others = runs[compared[0]] if compared else ()
    return [measured(way.name, at_once, found, others) for way, found in runs.items()]


def _conditions(plan: Plan) -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores"
    bound = ": the target has one thread on the first, the drafter one on the second" if plan.device == "cpu" else ""
    return (
        f"Target {plan.target}, drafter {plan.drafter}, T = {plan.temperature:g}, {plan.tokens} tokens after prompts "
        f"of at most {plan.prompt_tokens}, {plan.each} in each place and {FEWEST} at least, {plan.repeat} runs of each "
        f"way; {plan.dtype} on {plan.device}; {cores}{bound}; {plan.mib} MiB of keys and values."
    )


@dataclass(frozen=True, eq=False)
class Stage:
    """Everything that runs."""

    ways: tuple[Way, ...]
    texts: tuple[Ids, ...]  # the prompts' ids

    @staticmethod
    async def set_up(plan: Plan, stack: AsyncExitStack) -> "Stage":
        """Starts what is needed, until the stack is left; raises CommandFailed."""
        others_ways = [way for way in (GENERATE_BATCH, ASSISTED_WAY) if way in plan.ways]
        theirs = [(way, threads) for way in others_ways for threads in plan.threads]
        wanted = [*_served(plan), *(_transformers(plan, way, threads) for way, threads in theirs)]
        target, *others = await stack.enter_async_context(running(wanted))
        plain = await stack.enter_async_context(connect(target.address))
        ways: list[Way] = []
        if CROSSDRAFT in plan.ways:
            drafter = others.pop(0)
            drafted = await stack.enter_async_context(connect(target.address, drafter.address, needs_drafter=True))
            ways.append(Ours(CROSSDRAFT, drafted, plan.request(), target, drafter, plan.warm_ups))
        if PLAIN in plan.ways:
            ways.append(Ours(PLAIN, plain, plan.request(), target, None, plan.warm_ups))
        for (way, threads), process in zip(theirs, others, strict=True):
            label = f"{way}, {threads} {'threads' if threads > 1 else 'thread'}"
            ways.append(Theirs(label, process, alone=way == ASSISTED_WAY))
        freeze_heap()
        encode = plain.models.tokenization.encode_prompt
        return Stage(tuple(ways), tuple(tuple(encode(text)) for text in plan.texts))


def _served(plan: Plan) -> list[Startable]:
    """Our services: a target, and a drafter if one is needed."""
    where = ("--dtype", plan.dtype, "--device", plan.device, *(("--enforce-eager",) if plan.enforce_eager else ()))
    options = (*where, "--cache-mib", str(plan.mib), "--metrics-port", "0", "--no-enable-prefix-caching")
    target = Wanted("target", plan.target, 1, options, plan.core(0))
    return [target, *([Wanted("drafter", plan.drafter, 1, where, plan.core(1))] if CROSSDRAFT in plan.ways else [])]


def _transformers(plan: Plan, way: str, threads: int) -> Startable:
    return TransformersProcess(
        role=BATCHED if way == GENERATE_BATCH else ASSISTED,
        target=plan.target,
        assistant=plan.drafter,
        threads=threads,
        temperature=plan.temperature,
        mib=plan.mib,
        dtype=plan.dtype,
        device=plan.device,
        prefix=plan.core(0) if threads == 1 else (),
    )


ALONE = 4  # outputs of a way that makes one at a time: more would only take longer
WARM_UP = 8  # tokens of each output
KS = (None, 1, 2, 3, 5)  # that assisted generation is tried with; None: its own rule


@dataclass(frozen=True, eq=False)
class Ours:
    """A pipeline in this process, with services in others."""

    name: str
    pipeline: Pipeline
    request: GenerationRequest  # its prompt and its number of tokens are replaced
    target: Running
    drafter: Running | None
    warm_ups: tuple[tuple[int, int], ...] = ((ALONE, WARM_UP),)  # outputs at once, and tokens of each

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs."""
        for at_once, tokens in self.warm_ups:
            await self.run(prompts[: max(at_once, ALONE)], tokens, at_once)

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """As Way says."""
        places = Places(self, prompts, tokens)
        model, spent = await counted(self.target.ready["metrics"]), self._spent()
        began = places.began = time.monotonic()
        await places.fill(at_once)
        seconds, after = time.monotonic() - began, self._spent()
        model = (await counted(self.target.ready["metrics"])).since(model)
        outputs, statistics = zip(*(places.found[number] for number in range(len(prompts))), strict=True)
        return Run(outputs, seconds, between(spent, after), model, statistics)

    def _spent(self) -> Spent:
        drafter = 0.0 if self.drafter is None else processor_seconds(self.drafter.process_id)
        target = processor_seconds(self.target.process_id)
        return Spent(target, drafter, time.process_time(), time.thread_time())


@dataclass(eq=False)
class Places:
    """Some places, in each of which an output follows the one before until there are no more prompts."""

    way: Ours
    prompts: Sequence[Ids]
    tokens: int

    def __post_init__(self) -> None:
        self.began = 0.0  # in seconds of the monotonic clock
        self.found: dict[int, tuple[Made, Statistics]] = {}
        self._waiting: Iterator[int] = iter(range(len(self.prompts)))

    async def fill(self, count: int) -> None:
        """Returns when all outputs are made; raises what the first failure raised."""
        places: list[Task[None]] = []
        try:
            async with TaskGroup() as group:
                places += [group.create_task(self._place()) for _ in range(count)]
        except ExceptionGroup as error:
            raise error.exceptions[0] from error

    async def _place(self) -> None:
        for number in self._waiting:
            request = replace(self.way.request, prompt=self.prompts[number], max_tokens=self.tokens, choice=number)
            asked, ids, moments = self._now(), [], []
            async with self.way.pipeline.run(request) as generation:
                async for token in generation:
                    ids.append(token.id)
                    moments.append(self._now())
            if generation.statistics is None or not ids:
                raise CommandFailed("an output ended without a token or without its statistics")
            self.found[number] = Made(tuple(ids), asked, tuple(moments)), generation.statistics

    def _now(self) -> float:
        return time.monotonic() - self.began


@dataclass(eq=False)
class Theirs:
    """transformers in a process of its own."""

    name: str
    process: Running
    alone: bool = False  # one output after another, and so only a few
    k: int | None = None  # drafted at once; None: its own rule

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs; where tokens are drafted, the fastest number of them is looked for."""
        seconds: dict[int | None, float] = {}
        for k in KS if self.alone else (None,):
            for tokens in (WARM_UP, 4 * WARM_UP) if self.alone else (WARM_UP,):
                answer = await ask(self.process.address, Question(tuple(prompts[:ALONE]), tokens, ALONE, k))
                seconds[k] = answer.seconds
        self.k = min(seconds, key=lambda k: seconds[k])
        if self.alone:
            self.name += f", {'its own K' if self.k is None else f'K = {self.k}'}"

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """As Way says."""
        before, here, loop = processor_seconds(self.process.process_id), time.process_time(), time.thread_time()
        asked = tuple(prompts[:ALONE] if self.alone else prompts)
        answer = await ask(self.process.address, Question(asked, tokens, at_once, self.k))
        target = processor_seconds(self.process.process_id) - before
        spent = Spent(target, 0.0, time.process_time() - here, time.thread_time() - loop)
        fed = sum(map(len, asked)) + sum(len(made.ids) - 1 for made in answer.outputs)
        jobs = sum(len(made.ids) for made in answer.outputs)
        known = answer.forwards > 0
        model = Model(answer.forwards, jobs, fed, answer.seconds) if known else Model()
        return Run(answer.outputs, answer.seconds, spent, model)


def between(before: Spent, after: Spent) -> Spent:
    """What was spent meanwhile."""
    return Spent(
        after.target - before.target,
        after.drafter - before.drafter,
        after.here - before.here,
        after.loop - before.loop,
    )


async def counted(address: str) -> Model:
    """What a service has counted so far; raises CommandFailed if it does not say."""
    return model_of(await asyncio.to_thread(_read, f"http://{address}/metrics"))


def _read(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode("utf-8")
    return text


def model_of(text: str) -> Model:
    """From metrics as Prometheus reads them; raises CommandFailed if one is missing."""
    found = {sample.name: sample.value for one in text_string_to_metric_families(text) for sample in one.samples}
    names = ("model_steps_total", "batch_size_sum", "model_tokens_total", "model_seconds_total")
    try:
        return Model(*(found[f"{PREFIX}service_{name}"] for name in names))
    except KeyError as error:
        raise CommandFailed(f"the target's metrics have no {error.args[0]}") from error


MILLISECONDS = 1000.0


def measured(way: str, at_once: int, runs: Sequence[Run], others: Sequence[Run] = ()) -> Measured:
    """Figures of at least one run; `others` are of the same prompts, to compare ids with."""
    outputs = [made for run in runs for made in run.outputs]
    seconds, tokens = sum(run.seconds for run in runs), sum(len(made.ids) for made in outputs)
    statistics = [one for run in runs for one in run.statistics]
    model = [sum(column) for column in zip(*(_counts(run.model) for run in runs), strict=True)]
    steps, jobs, fed, in_model = model
    spent = [sum(column) / seconds for column in zip(*(_shares(run.spent) for run in runs), strict=True)]
    return Measured(
        way=way,
        at_once=at_once,
        outputs=len(outputs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        streaming=streaming([run.outputs for run in runs]),
        first_token_ms=Spread.of((made.moments[0] - made.asked for made in outputs), MILLISECONDS),
        per_token_ms=Spread.of(chain.from_iterable(map(_per_token, outputs)), MILLISECONDS),
        gap_ms=Spread.of((end - begin for made in outputs for begin, end in pairwise(made.moments)), MILLISECONDS),
        end_to_end_ms=Spread.of((made.moments[-1] - made.asked for made in outputs), MILLISECONDS),
        tokens_per_pass=_ratio(tokens, sum(one.passes for one in statistics)),
        acceptance=_ratio(
            sum(one.accepted for one in statistics), sum(one.accepted + one.corrected for one in statistics)
        ),
        sessions=_ratio(jobs, steps),
        fed=_ratio(fed, steps),
        busy=in_model / seconds if steps else None,
        target_cores=spent[0],
        drafter_cores=spent[1],
        here_cores=spent[2],
        loop_cores=spent[3],
        here_ms=MILLISECONDS * spent[2] * seconds / tokens,
        tokens_per_target_second=tokens / (spent[0] * seconds) if spent[0] else 0.0,
        same=same_outputs(runs, others) if others else None,
    )


def streaming(runs: Iterable[Sequence[Made]]) -> float | None:
    """Tokens a second between the latest first token and the earliest last one, over runs."""
    tokens, seconds = 0, 0.0
    for outputs in runs:
        first, last = max(made.moments[0] for made in outputs), min(made.moments[-1] for made in outputs)
        if last > first:
            seconds += last - first
            tokens += sum(first < moment <= last for made in outputs for moment in made.moments)
    return tokens / seconds if seconds else None


def same_outputs(runs: Sequence[Run], others: Sequence[Run]) -> int:
    """Outputs of `runs` whose ids are those at the same place in `others`, or their beginning."""
    pairs = ((one, other) for run, beside in zip(runs, others, strict=True) for one, other in _paired(run, beside))
    return sum(one.ids == other.ids for one, other in pairs)


def _paired(run: Run, beside: Run) -> Iterable[tuple[Made, Made]]:
    """One at a time makes fewer outputs: the first ones."""
    return zip(run.outputs, beside.outputs, strict=False)


def _per_token(made: Made) -> Iterable[float]:
    if len(made.moments) > 1:
        yield (made.moments[-1] - made.moments[0]) / (len(made.moments) - 1)


def _counts(model: Model) -> tuple[float, float, float, float]:
    return model.steps, model.jobs, model.tokens, model.seconds


def _shares(spent: Spent) -> tuple[float, float, float, float]:
    return spent.target, spent.drafter, spent.here, spent.loop


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# What `crossdraft bench throughput` found, as Markdown.

FULL = 0.9  # cores of an event loop from which on it may be what outputs wait for
SPEEDS = (
    *("at once", "way", "tokens/s", "while all stream", "first token, ms: p50", "p99", "ms a token: p50", "p99"),
    *("gaps, ms: p99", "whole output, ms: p50", "p99", "same ids"),
)
WORK = (
    *("at once", "way", "tokens/pass", "accepted", "sessions a forward", "tokens a forward", "target's model busy"),
    *(
        "cores: target",
        "drafter",
        "here",
        "... its event loop",
        "CPU here, ms a token",
        "tokens a CPU second of the target",
    ),
)


def report(found: Sequence[Measured], conditions: str) -> str:
    """Two tables, and what must be known to read them."""
    texts = [conditions, "\n\n", markdown(SPEEDS, [_speed(one) for one in found])]
    texts += ["\n", markdown(WORK, [_work(one) for one in found])]
    full = [f"{one.way} with {one.at_once}" for one in found if one.loop_cores >= FULL]
    if full:
        texts.append(
            f"\nThis process's event loop was as busy as it can be, and outputs waited for it: {', '.join(full)}\n"
        )
    return "".join(texts)


def _speed(one: Measured) -> tuple[str, ...]:
    return (
        str(one.at_once),
        one.way,
        f"{one.tokens_per_second:.1f}",
        _shown(one.streaming, ".1f"),
        *_spread(one.first_token_ms, 0),
        *_spread(one.per_token_ms, 1),
        _spread(one.gap_ms, 0)[1],
        *_spread(one.end_to_end_ms, 0),
        "" if one.same is None else f"{one.same} of {one.outputs}",
    )


def _work(one: Measured) -> tuple[str, ...]:
    return (
        str(one.at_once),
        one.way,
        _shown(one.tokens_per_pass, ".2f"),
        _shown(one.acceptance, ".2f"),
        _shown(one.sessions, ".1f"),
        _shown(one.fed, ".1f"),
        _shown(one.busy, ".0%"),
        *(f"{cores:.2f}" for cores in (one.target_cores, one.drafter_cores, one.here_cores, one.loop_cores)),
        f"{one.here_ms:.2f}",
        f"{one.tokens_per_target_second:.1f}",
    )


def _spread(spread: Spread | None, digits: int) -> tuple[str, str]:
    return ("", "") if spread is None else (f"{spread.p50:.{digits}f}", f"{spread.p99:.{digits}f}")


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# `crossdraft bench prefill`: what a long prompt does to the streams that share the target with it.

STEADY = 24  # tokens of every stream before the prompt comes
SHORT = 16  # tokens of a stream's own prompt
ANSWER = 4  # tokens of the long prompt's output
HEADINGS = ("gaps between tokens of the streams", "gaps", "p50, ms", "p99, ms", "longest, ms", "delayed by, passes")


@dataclass(frozen=True)
class PrefillPlan:
    """What is measured."""

    target: str  # a model's name
    streams: int
    prompt: int  # tokens of the long prompt
    times: int  # that it comes
    mib: int  # for keys and values

    @property
    def context(self) -> int:
        """Tokens that a session may have."""
        return self.prompt + 512


@dataclass(eq=False)
class Stream:
    """A stream that goes on until it is stopped."""

    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that lie in a time at least partly."""
        first, last = bisect_left(self.moments, begin), bisect_left(self.moments, end)
        moments = self.moments[max(0, first - 1) : last + 1]
        return [after - before for before, after in pairwise(moments)]


@dataclass(frozen=True)
class Arrival:
    """One long prompt among streams."""

    usual: tuple[float, ...]  # seconds between tokens of all streams, before it came
    meanwhile: tuple[float, ...]  # ... from its coming to its first token
    first_token: float  # seconds that it waited for that
    alone: float  # ... that it waits where there are no streams


def prefill_measure(plan: PrefillPlan, json_path: Path | None) -> None:
    """Measures some arrivals; a table on stdout, and JSON if a path is given.

    Raises:
        CommandFailed: the target does not start or fails.
        Misused: the model's context cannot be made long enough.
    """
    if json_path is not None:
        check_output(json_path)
    run_to_end(_prefill_measure(plan, json_path), STARTS_PROCESSES)


async def _prefill_measure(plan: PrefillPlan, json_path: Path | None) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        try:
            name = await asyncio.to_thread(lengthened, plan.target, plan.context, folder)
        except (ModelLoadError, OSError) as error:
            raise Misused(f"{error}; give a model with a context of {plan.context} tokens") from error
        options = ("--max-model-len", str(plan.context), "--cache-mib", str(plan.mib))
        (target,) = await stack.enter_async_context(running([Wanted("target", name, 1, options, on_core(0))]))
        pipeline = await stack.enter_async_context(connect(target.address))
        freeze_heap()
        arrivals = [await _arrival(pipeline, plan, number) for number in range(1 + plan.times)][
            1:
        ]  # the first warms up
    print(prefill_report(plan, arrivals), end="")
    if json_path is not None:
        write_json(json_path, {"plan": asdict(plan), "arrivals": [asdict(one) for one in arrivals]})


async def _arrival(pipeline: Pipeline, plan: PrefillPlan, number: int) -> Arrival:
    size = pipeline.models.tokenization.vocabulary.size

    def text(seed: int, length: int) -> tuple[int, ...]:
        """No two have a beginning in common."""
        return tuple((31 * seed + (1 + seed % 7) * place) % (size - 1) + 1 for place in range(length))

    alone = await _first_token(pipeline, text(1000 + number, plan.prompt))
    streams = [Stream() for _ in range(plan.streams)]
    tasks = [
        asyncio.create_task(_keep_on(pipeline, stream, text(100 * number + place, SHORT), plan.context - SHORT))
        for place, stream in enumerate(streams)
    ]
    try:
        await _steady(streams, tasks)
        steady = time.monotonic()
        await _steady(streams, tasks, steady)
        asked = time.monotonic()
        first_token = await _first_token(pipeline, text(2000 + number, plan.prompt))
        told = asked + first_token
        await _steady(streams, tasks, told, 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    usual = [gap for stream in streams for gap in stream.gaps(steady, asked)]
    meanwhile = [gap for stream in streams for gap in stream.gaps(asked, told)]
    return Arrival(tuple(usual), tuple(meanwhile), first_token, alone)


async def _keep_on(pipeline: Pipeline, stream: Stream, prompt: tuple[int, ...], tokens: int) -> None:
    async with pipeline.run(_request(prompt, tokens)) as generation:
        async for _ in generation:
            stream.moments.append(time.monotonic())


async def _first_token(pipeline: Pipeline, prompt: tuple[int, ...]) -> float:
    began = time.monotonic()
    async with pipeline.run(_request(prompt, ANSWER)) as generation:
        async for _ in generation:
            return time.monotonic() - began
    raise CommandFailed("an output ended without a token")


async def _steady(
    streams: Sequence[Stream], tasks: Sequence["asyncio.Task[None]"], since: float = 0.0, tokens: int = STEADY
) -> None:
    """Returns when every stream has had so many tokens since a moment; raises CommandFailed if one ends before."""
    while not all(len(one.moments) - bisect_left(one.moments, since) >= tokens for one in streams):
        for task in tasks:
            if task.done():
                await task
                raise CommandFailed("a stream ended before the long prompt was answered: give a shorter one")
        await asyncio.sleep(0.005)


def _request(prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=tokens, options=SamplingOptions(0.0), ignore_eos=True)


def prefill_report(plan: PrefillPlan, arrivals: Sequence[Arrival]) -> str:
    """A table, and what the prompt itself waited."""
    usual = Spread.of((gap for one in arrivals for gap in one.usual), MILLISECONDS)
    assert usual is not None
    rows = [
        _row("before the prompt", [gap for one in arrivals for gap in one.usual], usual.p50),
        _row("while it was read", [gap for one in arrivals for gap in one.meanwhile], usual.p50),
    ]
    beside = Spread.of((one.first_token for one in arrivals), MILLISECONDS)
    alone = Spread.of((one.alone for one in arrivals), MILLISECONDS)
    assert beside is not None
    assert alone is not None
    return (
        f"{markdown(HEADINGS, rows)}\nA pass is the median gap before the prompt. "
        f"{plan.streams} streams of {plan.target}, a prompt of {plan.prompt:,} tokens, "
        f"{len(arrivals)} times. Its first token came after {beside.p50:.0f} ms (median); without streams after "
        f"{alone.p50:.0f} ms.\n"
    )


def _row(name: str, gaps: Sequence[float], usual: float) -> tuple[str, ...]:
    spread = Spread.of(gaps, MILLISECONDS)
    if spread is None:
        return (name, "0", "", "", "", "")
    longest = MILLISECONDS * max(gaps)
    return (
        *(name, str(spread.count), f"{spread.p50:.1f}", f"{spread.p99:.1f}", f"{longest:.1f}"),
        f"{longest / usual - 1:.2f}",
    )


# `crossdraft bench memory`: many sessions of all lengths through one engine, and what the process holds meanwhile.

SAMPLES = 100  # in all
SHOWN = 10  # rows of the table
MEMORY_HEADINGS = ("sessions ended", "seconds", "resident, MiB", "live sessions", "places held", "of all places")


# Many sessions of all lengths through one engine: what it holds meanwhile, and how much memory the process has.


@dataclass(frozen=True)
class Soaking:
    """What is done to an engine."""

    sessions: int  # in all
    at_once: int
    longest: int  # tokens of a session, those that are drawn included
    steps: int  # tokens that a session draws, at most
    seed: int


def memory_measure(target: str, mib: int, soaking: Soaking, json_path: Path | None) -> None:
    """Runs all sessions; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a number does not fit the model.
        CommandFailed: the model cannot be loaded or run.
    """
    if json_path is not None:
        check_output(json_path)
    try:
        found = soak_of(target, mib, soaking, max(1, soaking.sessions // SAMPLES))
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except (ModelLoadError, ValueError) as error:
        raise CommandFailed(str(error)) from error
    print(memory_report(found, mib), end="")
    if json_path is not None:
        write_json(json_path, {"target": target, "mib": mib, "soaking": asdict(soaking)} | asdict(found))


@dataclass(frozen=True)
class Sample:
    """A moment."""

    ended: int  # sessions so far
    seconds: float  # since the first one
    resident: float  # MiB of this process
    held: int  # places of live sessions
    live: int  # sessions with places


@dataclass(frozen=True)
class Soaked:
    """All of it."""

    places: int  # of the engine
    loaded: float  # MiB of this process before the first session
    samples: tuple[Sample, ...]
    left: int  # places that are held after all sessions have ended

    @property
    def grown(self) -> float:
        """MiB that the process has more at the end than after a tenth of the sessions."""
        return self.samples[-1].resident - self.samples[len(self.samples) // 10].resident


def memory_report(found: Soaked, mib: int) -> str:
    """A table, and what it comes to."""
    step = max(1, len(found.samples) // SHOWN)
    rows = [_memory_row(sample, found.places) for sample in found.samples[step - 1 :: step]]
    most = max(sample.held for sample in found.samples)
    table = markdown(MEMORY_HEADINGS, rows)
    return (
        f"{table}\nBudget {mib} MiB, {found.places:,} places. The process had {found.loaded:.0f} MiB "
        f"before the first session, and grew by {found.grown:.1f} MiB from a tenth of the sessions to the end. At most "
        f"{most:,} places were held, and {found.left:,} after the last session.\n"
    )


def _memory_row(sample: Sample, places: int) -> tuple[str, ...]:
    held = (f"{sample.live}", f"{sample.held:,}", f"{sample.held / places:.0%}")
    return (f"{sample.ended:,}", f"{sample.seconds:.0f}", f"{sample.resident:.0f}", *held)


PREFIXES = 8  # texts that many sessions begin with
SHARED = 0.3  # of the sessions, those that begin with one of them
MIB = 1 << 20


@dataclass
class _Session:
    name: int
    ids: tuple[int, ...]
    left: int  # tokens to draw


def soak(engine: Engine, soaking: Soaking, every: int) -> Soaked:
    """Runs all sessions to their ends, some at once; a sample every so many."""
    loaded, began = resident(), time.monotonic()
    waiting = _sessions(engine, soaking)
    live: list[_Session] = []
    ended, samples = 0, list[Sample]()
    while live or ended < soaking.sessions:
        live += [one for _, one in zip(range(soaking.at_once - len(live)), waiting, strict=False)]
        logits = engine.forward([ForwardRequest(one.name, one.ids) for one in live])
        for one, row in zip(live, logits, strict=True):
            one.ids, one.left = (*one.ids, int(row.argmax())), one.left - 1
        for one in [one for one in live if not one.left]:
            engine.close(one.name)
            live.remove(one)
            ended += 1
            if ended % every == 0:
                seconds = time.monotonic() - began
                samples.append(Sample(ended, seconds, resident(), engine.slots_in_use, engine.sessions))
    return Soaked(engine.slots, loaded, tuple(samples), engine.slots_in_use)


def soak_of(name: str, budget: int, soaking: Soaking, every: int) -> Soaked:
    """The same for a model by its name, as a service runs it; torch has one thread from here on.

    Raises:
        ModelLoadError: it cannot be loaded.
        ValueError: the budget or the length does not fit, or the engine cannot run it.
    """
    torch.set_num_threads(1)
    model = load_model(name, max_length=soaking.longest).model
    pack(model)
    engine = Engine(model, soaking.longest, budget)
    engine.populate()
    return soak(engine, soaking, every)


def resident() -> float:
    """MiB of this process in main memory; 0.0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _sessions(engine: Engine, soaking: Soaking) -> Iterator[_Session]:
    """Lengths are drawn evenly on a logarithmic scale; ids evenly."""
    random = np.random.default_rng(soaking.seed)

    def text(size: int) -> tuple[int, ...]:
        return tuple(random.integers(engine.vocabulary_size, size=size).tolist())

    prefixes: Sequence[tuple[int, ...]] = [text(soaking.longest) for _ in range(PREFIXES)]
    for name in range(soaking.sessions):
        steps = int(random.integers(1, soaking.steps + 1))
        longest = soaking.longest - steps
        size = int(np.exp(random.uniform(np.log(SHORTEST), np.log(longest + 1))))
        shared = int(random.integers(size)) if random.random() < SHARED else 0
        prefix = prefixes[int(random.integers(PREFIXES))][:shared]
        yield _Session(name, prefix + text(size - shared), steps)
