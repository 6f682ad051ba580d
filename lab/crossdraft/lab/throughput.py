"""`crossdraft bench throughput`: many outputs at once, beside transformers' assisted generation with the same models.

Each model has one process and one thread of torch unless more are asked for; on a CPU the target has the first core,
the drafter the second one, and this process runs where there is room. transformers has the target's core. Where models
are on another device no process is bound to a core. Configurations take turns; one runs while the others are idle.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, TypeVar
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from crossdraft.cli.measuring import Columns, Table, total_of
from crossdraft.cli.processes import Running, Wanted, patience, running
from crossdraft.cli.running import STARTS_PROCESSES, CommandFailed, ProgressCounter, Run, UsageError, checked_options
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.request import Overlap
from crossdraft.lab.commands import ThroughputPlan
from crossdraft.lab.harness import MILLISECONDS, in_turns, numbers_of, on_core, optional, processor_seconds
from crossdraft.lab.loadtest.summary import Spread
from crossdraft.lab.services import NO_DEFAULTS
from crossdraft.lab.transformers_peer import Assisting, Made, Question, TransformersProcess
from crossdraft.lab.workload import Prompted, gathered
from crossdraft.rpc.metrics import PREFIX
from crossdraft.rpc.server import freeze_heap
from crossdraft.session.models import requested_method

CROSSDRAFT, CROSSDRAFT_PLAIN, ASSISTED = "crossdraft", "plain", "assisted"  # transformers' is the last
FIXED: dict[str, dict[str, Any]] = {  # choices in place of the controller's, and what a request says for each
    "lock-step": {"overlap": Overlap.OFF, "num_speculative_tokens": 5},
    "tree": {"overlap": Overlap.OFF, "num_speculative_tokens": 5, "tree_nodes": 16},
    "overlapped": {"overlap": Overlap.ON, "max_draft_tokens": 16, "min_draft_tokens": 0},
}
DRAFTED = (CROSSDRAFT, *FIXED)
CONFIGURATIONS = (*DRAFTED, CROSSDRAFT_PLAIN, ASSISTED)
SHIFT = 8  # tokens that a prompt begins later with each time that its text is used again
SHORTEST = 8  # tokens of a prompt
MORE_CLIENTS = 8  # times the most outputs at once that are asked for: clients that are tried at most
CLOSE = 4  # a number of clients that is fast enough and one that is too slow: they differ by a quarter at most
ONE_BY_ONE = 4  # outputs of assisted generation, which makes one at a time: more would only take longer
WARM_UP = 8  # tokens of each output that warms up
KS = (None, 1, 2, 3, 5)  # numbers of draft tokens that assisted generation is tried with; None: its own rule
FULL = 0.9  # cores; an event loop that takes more may be what outputs wait for
Ids = tuple[int, ...]


# What is measured of a run, and its figures.


@dataclass(frozen=True)
class ForwardCounts:
    """Counters of the target's service, or a difference of two readings."""

    steps: float = 0.0  # forwards
    jobs: float = 0.0  # sessions, summed over the forwards
    seconds: float = 0.0  # in forwards and draws


@dataclass(frozen=True)
class ProcessorTime:
    """Processor seconds."""

    target: float  # of its process
    drafter: float = 0.0
    loop: float = 0.0  # of the thread in which the orchestrator runs, and this measures


Counts = TypeVar("Counts", ForwardCounts, ProcessorTime)


def difference(after: Counts, before: Counts) -> Counts:
    """Field by field."""
    return type(after)(*(late - early for late, early in zip(astuple(after), astuple(before), strict=True)))


def total(counts: Iterable[Counts]) -> list[float]:
    """The sum of each field."""
    return [sum(column) for column in zip(*map(astuple, counts), strict=True)]


@dataclass(frozen=True)
class RunResult:
    """All outputs of one configuration that were made together."""

    outputs: tuple[Made, ...]
    seconds: float
    spent: ProcessorTime
    forwards: ForwardCounts = ForwardCounts()
    statistics: tuple[Statistics, ...] = ()  # empty: made by transformers


@dataclass(frozen=True)
class ThroughputResult:
    """One configuration with so many outputs at once, over all its runs."""

    configuration: str
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
    sessions: float | None  # in a forward of the target, mean
    forward_ms: float | None  # mean, draws included
    busy: float | None  # share of the time that the target was in forwards and draws
    target_cores: float  # processor seconds a second
    drafter_cores: float
    loop_cores: float  # of the thread of the orchestrator's event loop
    tokens_per_target_second: float  # of its processor: what a busy machine changes least
    draft_ms: float | None = None  # in the drafter's model, for each draft of it; None: there were none
    temperature: float = 0.0
    to_plain: float | None = None  # tokens/s as a ratio to no drafter's; None: that was not measured


def measured(configuration: str, at_once: int, runs: Sequence[RunResult], temperature: float = 0.0) -> ThroughputResult:
    """Figures of at least one run."""
    outputs = [made for run in runs for made in run.outputs]
    seconds, tokens = sum(run.seconds for run in runs), sum(len(made.ids) for made in outputs)
    statistics = [one for run in runs for one in run.statistics]
    ours = total_of(statistics) if statistics else None
    steps, jobs, in_model = total(run.forwards for run in runs)
    target, drafter, loop = total(run.spent for run in runs)
    return ThroughputResult(
        configuration=configuration,
        at_once=at_once,
        outputs=len(outputs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        streaming=streaming([run.outputs for run in runs]),
        first_token_ms=Spread.of((made.moments[0] - made.asked for made in outputs), MILLISECONDS),
        per_token_ms=Spread.of(
            (
                (made.moments[-1] - made.moments[0]) / (len(made.moments) - 1)
                for made in outputs
                if len(made.moments) > 1
            ),
            MILLISECONDS,
        ),
        gap_ms=Spread.of((end - begin for made in outputs for begin, end in pairwise(made.moments)), MILLISECONDS),
        end_to_end_ms=Spread.of((made.moments[-1] - made.asked for made in outputs), MILLISECONDS),
        tokens_per_pass=_ratio(tokens, ours.passes) if ours else None,
        acceptance=_ratio(ours.accepted, ours.accepted + ours.corrected) if ours else None,
        sessions=_ratio(jobs, steps),
        forward_ms=_ratio(MILLISECONDS * in_model, steps),
        busy=in_model / seconds if steps else None,
        target_cores=target / seconds,
        drafter_cores=drafter / seconds,
        loop_cores=loop / seconds,
        tokens_per_target_second=tokens / target if target else 0.0,
        draft_ms=_ratio(MILLISECONDS * ours.drafter_seconds, ours.epochs) if ours and ours.draft_tokens else None,
        temperature=temperature,
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


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _quantile(spread: Spread | None, name: str, digits: int) -> str:
    return "" if spread is None else f"{getattr(spread, name):.{digits}f}"


NAMES: Columns = {
    "at once": lambda one: one.at_once,
    "configuration": lambda one: one.configuration,
    "T": lambda one: f"{one.temperature:g}",
}
SPEEDS: Columns = {
    **NAMES,
    "tokens/s": lambda one: f"{one.tokens_per_second:.1f}",
    "to no drafter": lambda one: optional(one.to_plain, ".2f"),
    "while all stream": lambda one: optional(one.streaming, ".1f"),
    "first token, ms: p50": lambda one: _quantile(one.first_token_ms, "p50", 0),
    "first token: p99": lambda one: _quantile(one.first_token_ms, "p99", 0),
    "ms a token: p50": lambda one: _quantile(one.per_token_ms, "p50", 1),
    "a token: p99": lambda one: _quantile(one.per_token_ms, "p99", 1),
    "gaps, ms: p99": lambda one: _quantile(one.gap_ms, "p99", 0),
    "whole output, ms: p50": lambda one: _quantile(one.end_to_end_ms, "p50", 0),
    "whole output: p99": lambda one: _quantile(one.end_to_end_ms, "p99", 0),
}
WORK: Columns = {
    **NAMES,
    "tokens/pass": lambda one: optional(one.tokens_per_pass, ".2f"),
    "accepted": lambda one: optional(one.acceptance, ".2f"),
    "sessions a forward": lambda one: optional(one.sessions, ".1f"),
    "ms a forward": lambda one: optional(one.forward_ms, ".2f"),
    "ms a draft": lambda one: optional(one.draft_ms, ".2f"),
    "target's model busy": lambda one: optional(one.busy, ".0%"),
    "cores: target": lambda one: f"{one.target_cores:.2f}",
    "drafter": lambda one: f"{one.drafter_cores:.2f}",
    "event loop here": lambda one: f"{one.loop_cores:.2f}",
    "tokens a CPU second of the target": lambda one: f"{one.tokens_per_target_second:.1f}",
}


# The benchmark.


def limits_of(results: Iterable[ThroughputResult], speed: float) -> tuple[int, int]:
    """The most clients of which nine in ten get so many tokens/s, and the fewest above of which fewer do; 0: none."""
    times = {one.at_once: one.per_token_ms for one in results}
    fast = max((count for count, ms in times.items() if ms and ms.p90 * speed <= MILLISECONDS), default=0)
    return fast, min((count for count in times if count > fast), default=0)


def clients_served(results: Sequence[ThroughputResult], speed: float) -> Iterator[str]:
    """For each configuration and temperature, how many clients at once get this many tokens/s."""
    for temperature, name in dict.fromkeys((one.temperature, one.configuration) for one in results):
        found = (one for one in results if (one.temperature, one.configuration) == (temperature, name))
        fast, slow = limits_of(found, speed)
        most = f"{fast}, and not {slow}" if slow else f"at least {fast}"
        yield f"Clients that get {speed:g} tokens/s, nine in ten, T = {temperature:g}, {name}: {most}"


def next_clients(known: Sequence[ThroughputResult], speed: float, most: int) -> int:
    """How many clients to try next, given results of one configuration: twice as many as are fast enough, until they
    are not, then numbers between; 0: that is close enough, or more than `most`, or one is too slow."""
    fast, slow = limits_of(known, speed)
    if not slow:
        return min(2 * fast, most) if fast < most else 0
    return (fast + slow) // 2 if fast + 1 < slow and CLOSE * (slow - fast) > slow else 0


def prompts_of(texts: Sequence[Ids], needed: int, longest: int, count: int = 0) -> list[Ids]:
    """Prompts of at most `longest` tokens, no two with the same beginning: a text that is used again begins later.

    Args:
        texts: ids of each.
        needed: prompts, at least.
        longest: tokens.
        count: prompts, if there are so many.

    Raises:
        UsageError: there are fewer than needed.
    """
    count = max(needed, count)
    found: list[Ids] = []
    for turn in range(1 + count // len(texts)):
        later = [ids[SHIFT * turn :][:longest] for ids in texts]
        found += [ids for ids in later if len(ids) >= SHORTEST]
    if len(found) < needed:
        raise UsageError(
            f"the prompts are enough for {len(found)} outputs, and {needed} are asked for: give more prompts"
        )
    return found[:count]


class Throughput(Prompted[ThroughputPlan, ThroughputResult]):
    """What is measured."""

    unit = "runs"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    @cached_property
    def at_once(self) -> tuple[int, ...]:
        """Outputs under way together, each in turn; raises UsageError."""
        return numbers_of("--concurrency", self.plan.concurrency, 1, 1024, int)

    @property
    def theirs(self) -> tuple[int, ...]:
        """Threads of transformers' configurations."""
        return self.plan.threads if ASSISTED in self.plan.way else ()

    @property
    def total(self) -> int | None:
        ours = sum(way in self.plan.way for way in (*DRAFTED, CROSSDRAFT_PLAIN))
        cells = len(self.at_once) * len(self.plan.temperatures) * self.plan.repeat
        return None if self.plan.clients_at else cells * (ours + len(self.theirs))

    @property
    def most_clients(self) -> int:
        """Outputs at once, at most."""
        return max(self.at_once) * (MORE_CLIENTS if self.plan.clients_at else 1)

    @property
    def warm_ups(self) -> tuple[tuple[int, int], ...]:
        """Outputs at once and tokens of each for our services. Elsewhere than on a CPU each new shape of a forward
        costs time once, so all that is measured is done before."""
        if self.plan.device == "cpu":
            return ((ONE_BY_ONE, WARM_UP),)
        return tuple((count, max(WARM_UP, self.plan.tokens // 2)) for count in self.at_once)

    def core(self, number: int) -> tuple[str, ...]:
        """The prefix of a model's command that binds it to a core."""
        return on_core(number) if self.plan.device == "cpu" else ()

    def outputs(self, at_once: int) -> int:
        """Of one run."""
        return max(self.plan.min_outputs, at_once * self.plan.each)

    def check(self) -> None:
        unknown = [name for name in self.plan.way if name not in CONFIGURATIONS]
        if unknown or not self.plan.way:
            raise UsageError(f"--way is one of {', '.join(CONFIGURATIONS)}, got {', '.join(unknown) or 'none'}")
        super().check()
        assert self.at_once
        if self.theirs and len(self.plan.temperatures) > 1:
            raise UsageError("assisted generation has one temperature: give one, or leave it out by --configuration")
        with checked_options():
            for temperature in self.plan.temperatures:
                requested_method(self.request(temperature))

    def request(self, temperature: float) -> GenerationRequest:
        """One output, whatever its prompt; raises ValueError."""
        options = SamplingOptions(temperature, top_k=self.plan.top_k)
        return GenerationRequest(
            "x", method=self.plan.method, max_tokens=self.plan.tokens, options=options, ignore_eos=True
        )

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[ThroughputResult, None]:
        plan = self.plan
        async with AsyncExitStack() as stack:
            ways, texts = await start(self, stack)
            needed, wished = self.outputs(max(self.at_once)), self.outputs(self.most_clients)
            prompts = prompts_of(texts, needed, plan.prompt_tokens, wished)
            most = min(self.most_clients, len(prompts) // plan.each)
            for one in ways:
                await one.warm_up(prompts)

            async def cell(ways: Sequence[Way], at_once: int, options: SamplingOptions) -> list[ThroughputResult]:
                async def run(way: Way, _: int) -> RunResult:
                    found = await way.run(prompts[: self.outputs(at_once)], plan.tokens, at_once, options)
                    advance()
                    return found

                runs = (await in_turns(ways, plan.repeat, run)).items()
                found = [measured(way.name, at_once, one, options.temperature) for way, one in runs]
                plain = next((one.tokens_per_second for one in found if one.configuration == CROSSDRAFT_PLAIN), None)
                return [replace(one, to_plain=plain and one.tokens_per_second / plain) for one in found]

            for options in (self.request(temperature).options for temperature in plan.temperatures):
                found: list[ThroughputResult] = []
                for at_once in self.at_once:
                    found += await cell(ways, at_once, options)
                    for result in found[-len(ways) :]:
                        yield result
                for one in (way for way in ways if plan.clients_at and way.name in (CROSSDRAFT, CROSSDRAFT_PLAIN)):
                    known = [result for result in found if result.configuration == one.name]
                    while clients := next_clients(known, plan.clients_at, most):
                        known += await cell([one], clients, options)
                        yield known[-1]

    def report(self, results: Sequence[ThroughputResult]) -> Iterator[Table | str]:
        yield self.conditions
        yield Table.of(results, SPEEDS)
        yield Table.of(results, WORK)
        yield from clients_served(results, self.plan.clients_at) if self.plan.clients_at else ()
        full = [f"{one.configuration} with {one.at_once}" for one in results if one.loop_cores >= FULL]
        if full:
            yield f"This process's event loop was as busy as it can be, and outputs waited for it: {', '.join(full)}"

    @property
    def conditions(self) -> str:
        """Models, sizes, cores."""
        plan, cores = self.plan, f"{len(os.sched_getaffinity(0))} cores"
        temperatures = ", ".join(f"{one:g}" for one in plan.temperatures) + f", top-k {plan.top_k or 'all'}"
        cpu = ": the target has one thread on the first, the drafter one on the second" if plan.device == "cpu" else ""
        weights = plan.dtype + (f", {plan.quantization} in our target" if plan.quantization else "")
        return (
            f"Target {plan.target}, drafter {plan.drafter}, T = {temperatures}, {plan.tokens} tokens after prompts of "
            f"at most {plan.prompt_tokens}, {plan.each} in each place and {plan.min_outputs} at least, {plan.repeat} "
            f"runs of each configuration; {weights} on {plan.device}; {cores}{cpu}; {plan.cache_mib} MiB of keys "
            "and values."
        )


# The configurations.


async def start(bench: Throughput, stack: AsyncExitStack) -> tuple[list["Way"], list[Ids]]:
    """Starts all processes, until the stack is left; the configurations, and the prompts' ids.

    Raises:
        CommandFailed: a process does not start.
    """
    target, *drafter = await stack.enter_async_context(running(served(bench)))
    plain = await stack.enter_async_context(connect(target.address, patience=patience()))
    found: list[Way] = []
    base = bench.request(bench.plan.temperatures[0])
    for name in (one for one in DRAFTED if one in bench.plan.way):  # each learns by its own connection
        pipeline = connect(target.address, drafter[0].address, patience(), needs_drafter=True)
        drafted, request = await stack.enter_async_context(pipeline), replace(base, **FIXED.get(name, {}))
        found.append(Ours(name, drafted, request, target, drafter[0], bench.warm_ups))
    if CROSSDRAFT_PLAIN in bench.plan.way:
        found.append(Ours(CROSSDRAFT_PLAIN, plain, base, target, None, bench.warm_ups))
    for threads in bench.theirs:
        process = stack.enter_context(TransformersProcess(assisting(bench, threads)))
        found.append(Theirs(f"{ASSISTED}, {threads} {'threads' if threads > 1 else 'thread'}", process))
    freeze_heap()
    encode = plain.models.tokenization.encode_prompt
    return found, [tuple(encode(text)) for text in bench.prompts]


def served(bench: Throughput) -> list[Wanted]:
    """Our services: a target, and a drafter if one is needed."""
    plan = bench.plan
    graphs, eager = plan.cuda_graph_sizes, plan.enforce_eager
    where = EngineOptions(dtype=plan.dtype, device=plan.device, cuda_graph_sizes=graphs, enforce_eager=eager).arguments
    quantized = ("--quantization", plan.quantization) if plan.quantization else ()
    cache = ("--cache-mib", str(plan.cache_mib), "--no-enable-prefix-caching")
    sessions = ("--max-sessions", str(bench.most_clients)) if plan.clients_at else ()
    own = (*NO_DEFAULTS, *where, *quantized, *cache, *sessions, "--metrics-port", "0")
    target = Wanted("target", plan.target, 1, own, bench.core(0))
    if not set(DRAFTED) & set(plan.way):
        return [target]
    small = ("--cache-mib", str(max(STARTED.cache_mib or 0, plan.cache_mib // 8)))
    return [target, Wanted("drafter", plan.drafter, 1, (*where, *small, *sessions), bench.core(1))]


def assisting(bench: Throughput, threads: int) -> Assisting:
    """One of transformers' configurations."""
    plan, alone = bench.plan, threads == 1 and bench.plan.device == "cpu"
    return Assisting(plan.target, plan.drafter, threads, plan.temperatures[0], plan.dtype, plan.device, alone)


@dataclass(frozen=True, eq=False)
class Ours:
    """A pipeline in this process, with services in others."""

    name: str
    pipeline: Pipeline
    request: GenerationRequest  # its prompt and its number of tokens are replaced
    target: Running
    drafter: Running | None
    warm_ups: tuple[tuple[int, int], ...]  # outputs at once, and tokens of each

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs."""
        for at_once, tokens in self.warm_ups:
            await self.run(prompts[: max(at_once, ONE_BY_ONE)], tokens, at_once, self.request.options)

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int, options: SamplingOptions) -> RunResult:
        asked = replace(self.request, max_tokens=tokens, options=options)
        forwards, spent = await forward_counts(self.target.ready["metrics"]), self._spent()
        began = time.monotonic()

        async def made(number: int) -> tuple[Made, Statistics]:
            return await self._output(replace(asked, prompt=prompts[number], choice=number), began)

        found = await gathered(made, range(len(prompts)), at_once)
        seconds, after = time.monotonic() - began, self._spent()
        forwards = difference(await forward_counts(self.target.ready["metrics"]), forwards)
        outputs, statistics = zip(*found, strict=True)
        return RunResult(outputs, seconds, difference(after, spent), forwards, statistics)

    async def _output(self, request: GenerationRequest, began: float) -> tuple[Made, Statistics]:
        asked, ids, moments = time.monotonic() - began, [], []
        async with self.pipeline.run(request) as generation:
            async for token in generation:
                ids.append(token.id)
                moments.append(time.monotonic() - began)
        if generation.statistics is None or not ids:
            raise CommandFailed("an output ended without a token or without its statistics")
        return Made(tuple(ids), asked, tuple(moments)), generation.statistics

    def _spent(self) -> ProcessorTime:
        drafter = 0.0 if self.drafter is None else processor_seconds(self.drafter.process_id)
        return _spent(self.target, drafter)


@dataclass(eq=False)
class Theirs:
    """transformers' assisted generation in a process of its own: one output after another, and so only a few."""

    name: str
    process: TransformersProcess
    k: int | None = None  # draft tokens in a round; None: its own rule

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs, by which the fastest number of draft tokens is found."""
        seconds: dict[int | None, float] = {}
        for k in KS:
            for tokens in (WARM_UP, 4 * WARM_UP):
                question = Question(tuple(prompts[:ONE_BY_ONE]), tokens, k)
                seconds[k] = (await self.process.ask(question)).seconds
        self.k = min(seconds, key=lambda k: seconds[k])
        self.name += f", {'its own K' if self.k is None else f'K = {self.k}'}"

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int, options: SamplingOptions) -> RunResult:
        before = _spent(self.process)
        answer = await self.process.ask(Question(tuple(prompts[:ONE_BY_ONE]), tokens, self.k))
        return RunResult(answer.outputs, answer.seconds, difference(_spent(self.process), before))


Way = Ours | Theirs  # a configuration


def _spent(target: Running | TransformersProcess, drafter: float = 0.0) -> ProcessorTime:
    """Until now."""
    return ProcessorTime(processor_seconds(target.process_id), drafter, time.thread_time())


async def forward_counts(address: str) -> ForwardCounts:
    """What a service has counted so far, from its metrics at host:port; raises CommandFailed if it does not say."""
    with await asyncio.to_thread(urlopen, f"http://{address}/metrics", timeout=30) as answer:
        return counts_of((await asyncio.to_thread(answer.read)).decode("utf-8"))


def counts_of(text: str) -> ForwardCounts:
    """From metrics as Prometheus reads them; raises CommandFailed if one is missing."""
    found = {sample.name: sample.value for one in text_string_to_metric_families(text) for sample in one.samples}
    names = ("model_steps_total", "batch_size_sum", "model_seconds_total")
    try:
        return ForwardCounts(*(found[f"{PREFIX}service_{name}"] for name in names))
    except KeyError as error:
        raise CommandFailed(f"the target's metrics have no {error.args[0]}") from error
