"""`crossdraft bench throughput`: many outputs at once, beside transformers' assisted generation with the same models.

Target and drafter run in this process, as `crossdraft serve http --target-model --drafter-model` has them, each with a
thread of its own. On a CPU the target's has the first core, the drafter's the second one, and the event loop runs where
there is room; transformers has a thread on the target's core, too, if it is to use one. Where models are on another
device nothing is bound to a core. Configurations take turns; one runs while the others are idle.
"""

import copy
import os
import threading
import time
from asyncio import get_running_loop
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, replace
from typing import ClassVar

import torch
import uvloop
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from crossdraft.cli.measuring import Columns, Table, repeats
from crossdraft.cli.processes import patience
from crossdraft.cli.running import CommandFailed, ProgressCounter, Run, UsageError, checked_options
from crossdraft.cli.serve import faults_of_models
from crossdraft.client import GenerationRequest, SamplingOptions, connect
from crossdraft.config.engine import STARTED, Dtype
from crossdraft.config.service import SessionOptions
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import source_of
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.commands import ThroughputPlan
from crossdraft.lab.harness import Prompted, in_turns, lock_step, optional, overlapped
from crossdraft.lab.outputs import MILLISECONDS, Ours, Output, RunResult, Spread, Together, Work, ratio
from crossdraft.rpc.server import Listening, freeze_heap
from crossdraft.serving.models import Served, Servers, serving
from crossdraft.session.models import requested_method

CROSSDRAFT, CROSSDRAFT_PLAIN, ASSISTED = "crossdraft", "plain", "assisted"  # transformers' is the last
FIXED = {"lock-step": lock_step(5), "tree": lock_step(5, 16), "overlapped": overlapped(16, 0)}
DRAFTED = (CROSSDRAFT, *FIXED)
CONFIGURATIONS = (*DRAFTED, CROSSDRAFT_PLAIN, ASSISTED)
SHIFT = 8  # tokens that a prompt begins later with each time that its text is used again
SHORTEST = 8  # tokens of a prompt
MORE_CLIENTS = 8  # times the most outputs at once that are asked for: clients that are tried at most
CLOSE = 4  # a number of clients that is fast enough and one that is too slow: they differ by a quarter at most
ONE_BY_ONE = 4  # outputs of assisted generation, which makes one at a time: more would only take longer
WARM_UP = 8  # tokens of each output that warms up
KS = (None, 1, 2, 3, 5)  # numbers of draft tokens that assisted generation is tried with; None: its own rule
SESSIONS = 256  # of a service, at least
NEVER = -1  # an end-of-text id that no model draws
FULL = 0.9  # cores; an event loop that takes more may be what outputs wait for
Ids = tuple[int, ...]


# What is measured of a run, and its figures.


@dataclass(frozen=True, kw_only=True)
class ThroughputResult(Together):
    """One configuration with so many outputs at once, over all its runs."""

    configuration: str
    at_once: int
    outputs: int
    streaming: float | None  # tokens/s while all outputs were under way and had begun; None: there was no such time
    repeating: int  # outputs that repeat themselves
    others_per_token_ms: Spread | None  # per_token_ms of the others
    others_per_pass: float | None  # tokens_per_pass of the others
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
    others = [output for output in outputs if not repeats(output.ids)]
    seconds, total = sum(run.seconds for run in runs), Together.figures_of(outputs)
    found, of_others = (Together.fields_of(some, seconds) for some in (outputs, others))
    work = Work(*map(sum, zip(*(astuple(run.work) for run in runs), strict=True)))
    return ThroughputResult(
        **found,
        configuration=configuration,
        at_once=at_once,
        outputs=len(outputs),
        streaming=streaming([run.outputs for run in runs]),
        repeating=len(outputs) - len(others),
        others_per_token_ms=of_others["per_token_ms"],
        others_per_pass=of_others["tokens_per_pass"],
        sessions=ratio(work.jobs, work.steps),
        forward_ms=ratio(MILLISECONDS * work.seconds, work.steps),
        busy=work.seconds / seconds if work.steps else None,
        target_cores=work.target / seconds,
        drafter_cores=work.drafter / seconds,
        loop_cores=work.loop / seconds,
        tokens_per_target_second=found["tokens"] / work.target if work.target else 0.0,
        draft_ms=ratio(MILLISECONDS * total.drafter_seconds, total.epochs) if total and total.draft_tokens else None,
        temperature=temperature,
    )


def streaming(runs: Iterable[Sequence[Output]]) -> float | None:
    """Tokens a second between the latest first token and the earliest last one, over runs."""
    tokens, seconds = 0, 0.0
    for outputs in runs:
        first, last = max(made.moments[0] for made in outputs), min(made.moments[-1] for made in outputs)
        if last > first:
            seconds += last - first
            tokens += sum(first < moment <= last for made in outputs for moment in made.moments)
    return tokens / seconds if seconds else None


def _quantile(spread: Spread | None, name: str, digits: int) -> str:
    return "" if spread is None else f"{getattr(spread, name):.{digits}f}"


NAMES: Columns = {
    "at once": lambda cell: cell.at_once,
    "configuration": lambda cell: cell.configuration,
    "T": lambda cell: f"{cell.temperature:g}",
}
SPEEDS: Columns = {
    **NAMES,
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.1f}",
    "to no drafter": lambda cell: optional(cell.to_plain, ".2f"),
    "while all stream": lambda cell: optional(cell.streaming, ".1f"),
    "first token, ms: p50": lambda cell: _quantile(cell.first_token_ms, "p50", 0),
    "first token: p99": lambda cell: _quantile(cell.first_token_ms, "p99", 0),
    "ms a token: p50": lambda cell: _quantile(cell.per_token_ms, "p50", 1),
    "a token: p99": lambda cell: _quantile(cell.per_token_ms, "p99", 1),
    "without repeats: p50": lambda cell: f"{_quantile(cell.others_per_token_ms, 'p50', 1)} ({cell.repeating})",
    "gaps, ms: p99": lambda cell: _quantile(cell.between_chunks_ms, "p99", 0),
    "whole output, ms: p50": lambda cell: _quantile(cell.end_to_end_ms, "p50", 0),
    "whole output: p99": lambda cell: _quantile(cell.end_to_end_ms, "p99", 0),
}
WORK: Columns = {
    **NAMES,
    "tokens/pass": lambda cell: optional(cell.tokens_per_pass, ".2f"),
    "without repeats": lambda cell: optional(cell.others_per_pass, ".2f"),
    "accepted": lambda cell: optional(cell.acceptance, ".2f"),
    "sessions a forward": lambda cell: optional(cell.sessions, ".1f"),
    "ms a forward": lambda cell: optional(cell.forward_ms, ".2f"),
    "ms a draft": lambda cell: optional(cell.draft_ms, ".2f"),
    "target's model busy": lambda cell: optional(cell.busy, ".0%"),
    "cores: target": lambda cell: f"{cell.target_cores:.2f}",
    "drafter": lambda cell: f"{cell.drafter_cores:.2f}",
    "event loop here": lambda cell: f"{cell.loop_cores:.2f}",
    "tokens a CPU second of the target": lambda cell: f"{cell.tokens_per_target_second:.1f}",
}


# The benchmark.


def limits_of(results: Iterable[ThroughputResult], speed: float) -> tuple[int, int]:
    """The most clients of which nine in ten get so many tokens/s, and the fewest above of which fewer do; 0: none."""
    times = {result.at_once: result.per_token_ms for result in results}
    fast = max((count for count, ms in times.items() if ms and ms.p90 * speed <= MILLISECONDS), default=0)
    return fast, min((count for count in times if count > fast), default=0)


def clients_served(results: Sequence[ThroughputResult], speed: float) -> Iterator[str]:
    """For each configuration and temperature, how many clients at once get this many tokens/s."""
    for temperature, name in dict.fromkeys((result.temperature, result.configuration) for result in results):
        found = (result for result in results if (result.temperature, result.configuration) == (temperature, name))
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
    `texts`: their ids. `count`: prompts if there are so many. Raises UsageError: there are fewer than needed."""
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
    runner: ClassVar[Run] = staticmethod(uvloop.run)  # as servers have it

    @property
    def theirs(self) -> tuple[int, ...]:
        """Threads of transformers' configurations."""
        return self.plan.assisted_threads if ASSISTED in self.plan.configuration else ()

    @property
    def total(self) -> int | None:
        ours = sum(name != ASSISTED for name in {*self.plan.configuration})
        cells = len(self.plan.concurrency) * len(self.plan.temperatures) * self.plan.repeat
        return None if self.plan.clients_at else cells * (ours + len(self.theirs))

    @property
    def most_clients(self) -> int:
        """Outputs at once, at most."""
        return max(self.plan.concurrency) * (MORE_CLIENTS if self.plan.clients_at else 1)

    @property
    def warm_ups(self) -> tuple[tuple[int, int], ...]:
        """Outputs at once and tokens of each for our services. Elsewhere than on a CPU each new shape of a forward
        costs time once, so all that is measured is done before."""
        if self.plan.engine.device == "cpu":
            return ((ONE_BY_ONE, WARM_UP),)
        return tuple((count, max(WARM_UP, self.plan.tokens // 2)) for count in self.plan.concurrency)

    def outputs(self, at_once: int) -> int:
        """Of one run."""
        return max(self.plan.min_outputs, at_once * self.plan.each)

    def check(self) -> None:
        unknown = [name for name in self.plan.configuration if name not in CONFIGURATIONS]
        if unknown or not self.plan.configuration:
            raise UsageError(f"--configuration: one of {', '.join(CONFIGURATIONS)}, got {', '.join(unknown) or 'none'}")
        super().check()
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
            configurations, texts = await start(self, stack)
            needed, wished = self.outputs(max(plan.concurrency)), self.outputs(self.most_clients)
            prompts = prompts_of(texts, needed, plan.prompt_tokens, wished)
            most = min(self.most_clients, len(prompts) // plan.each)
            for one in configurations:
                if isinstance(one, Theirs):
                    await one.warm_up(prompts)
                    continue
                for at_once, tokens in self.warm_ups:
                    await one.run(prompts[: max(at_once, ONE_BY_ONE)], tokens, at_once)

            async def cell(
                some: Sequence[Configuration], at_once: int, options: SamplingOptions
            ) -> list[ThroughputResult]:
                async def run(configuration: Configuration, _: int) -> RunResult:
                    found = await configuration.run(prompts[: self.outputs(at_once)], plan.tokens, at_once, options)
                    advance()
                    return found

                runs = (await in_turns(some, plan.repeat, run)).items()
                found = [measured(one.name, at_once, made, options.temperature) for one, made in runs]
                plain = {result.configuration: result.tokens_per_second for result in found}.get(CROSSDRAFT_PLAIN)
                return [replace(result, to_plain=plain and result.tokens_per_second / plain) for result in found]

            for options in (self.request(temperature).options for temperature in plan.temperatures):
                found: list[ThroughputResult] = []
                for at_once in plan.concurrency:
                    found += await cell(configurations, at_once, options)
                    for result in found[-len(configurations) :]:
                        yield result
                searched = (one for one in configurations if one.name in (CROSSDRAFT, CROSSDRAFT_PLAIN))
                for one in searched if plan.clients_at else ():
                    known = [result for result in found if result.configuration == one.name]
                    while clients := next_clients(known, plan.clients_at, most):
                        known += await cell([one], clients, options)
                        yield known[-1]

    def report(self, results: Sequence[ThroughputResult]) -> Iterator[Table | str]:
        yield self.conditions
        yield Table.of(results, SPEEDS)
        yield Table.of(results, WORK)
        yield from clients_served(results, self.plan.clients_at) if self.plan.clients_at else ()
        full = [f"{result.configuration} with {result.at_once}" for result in results if result.loop_cores >= FULL]
        if full:
            yield f"This process's event loop was as busy as it can be, and outputs waited for it: {', '.join(full)}"

    @property
    def conditions(self) -> str:
        """Models, sizes, cores."""
        plan, engine, cores = self.plan, self.plan.engine, f"{len(os.sched_getaffinity(0))} cores"
        temperatures = ", ".join(f"{t:g}" for t in plan.temperatures) + f", top-k {plan.top_k or 'all'}"
        cpu = ": the target's thread is on the first, the drafter's on the second" if engine.device == "cpu" else ""
        weights = engine.dtype + (f", {engine.quantization} in our target" if engine.quantization else "")
        return (
            f"Target {plan.target}, drafter {plan.drafter}, T = {temperatures}, {plan.tokens} tokens after prompts of "
            f"at most {plan.prompt_tokens}, {plan.each} in each place and {plan.min_outputs} at least, {plan.repeat} "
            f"runs of each configuration; {weights} on {engine.device}; {cores}{cpu}; {engine.cache_mib} MiB of keys "
            "and values."
        )


# The configurations.


async def start(bench: Throughput, stack: AsyncExitStack) -> tuple[list["Configuration"], list[Ids]]:
    """Loads all models, until the stack is left; the configurations, and the prompts' ids. Raises UsageError,
    CommandFailed: a model cannot be run."""
    plan = bench.plan
    with faults_of_models():
        servers = await stack.enter_async_context(serving(*models_of(bench)))
    models, on_cpu = Models(servers), plan.engine.device == "cpu"
    if on_cpu:
        models.bind()
    target, base = servers["target"].here, bench.request(plan.temperatures[0])
    plain = await stack.enter_async_context(connect(target, patience=patience()))
    found = list[Configuration]()
    for name in (name for name in DRAFTED if name in plan.configuration):  # each learns by its own connection
        pipeline = connect(target, servers["drafter"].here, patience(), needs_drafter=True)
        drafted, request = await stack.enter_async_context(pipeline), replace(base, **FIXED.get(name, {}))
        found.append(Ours(name, drafted, request, models.work))
    if CROSSDRAFT_PLAIN in plan.configuration:
        found.append(Ours(CROSSDRAFT_PLAIN, plain, base, models.work))
    if bench.theirs:
        pair = AssistedGeneration(plan.target, plan.drafter, plan.engine.dtype, plan.engine.device)
        found += [Theirs(pair, threads, on_cpu, base.options) for threads in bench.theirs]
    freeze_heap()
    encode = plain.models.tokenization.encode_prompt
    return found, [tuple(encode(text)) for text in bench.prompts]


def models_of(bench: Throughput) -> tuple[Served, Served | None]:
    """Ours: a target, and a drafter if one is needed."""
    plan, engine = bench.plan, bench.plan.engine
    sessions = SessionOptions(max_sessions=max(SESSIONS, bench.most_clients))
    place = Listening(port=None, grace_seconds=0, sessions=sessions)
    target = ModelOptions.of(plan.target, engine), place
    if not set(DRAFTED) & set(plan.configuration):
        return target, None
    mib = max(STARTED.cache_mib or 0, (engine.cache_mib or 0) // 8)
    small = replace(engine, cache_mib=mib, quantization=None, enable_prefix_caching=True)
    return target, (ModelOptions.of(plan.drafter, small), place)


@dataclass(frozen=True, eq=False)
class Models:
    """Our models, which run in this process."""

    servers: Servers  # by role

    def thread(self, role: str) -> threading.Thread | None:
        """The one that a model runs in."""
        named = [thread for thread in threading.enumerate() if thread.name == f"{role} model"]
        return named[-1] if role in self.servers and named else None

    def bind(self) -> None:
        """Gives each thread a core."""
        cores = sorted(os.sched_getaffinity(0))
        for number, thread in enumerate(filter(None, map(self.thread, self.servers))):
            os.sched_setaffinity(thread.native_id or 0, {cores[number % len(cores)]})

    def work(self) -> Work:
        """Until now."""
        counted = self.servers["target"].statistics()
        jobs = sum(sessions * steps for sessions, steps in counted.batches.items())
        target, drafter = (_processor_seconds(self.thread(role)) for role in ("target", "drafter"))
        return Work(target, drafter, time.thread_time(), counted.steps, jobs, counted.seconds)


def _processor_seconds(thread: threading.Thread | None) -> float:
    return 0.0 if thread is None else time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


class Moments(BaseStreamer):
    """When the tokens of an output came, in seconds of the monotonic clock; those of one round come together."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._began = False  # what comes first is the prompt

    def put(self, value: Tensor) -> None:
        self.found += [time.monotonic()] * value.numel() if self._began else []
        self._began = True

    def end(self) -> None:
        """As BaseStreamer: there are no more."""


class AssistedGeneration:
    """A target and an assistant with tokenizers of their own, one sequence at a time.

    At temperature above 0 transformers (5.23) has the assistant propose tokens of both vocabularies, as `tli` does. It
    draws with torch's global generator, and so does this. Raises ModelLoadError: one of the models cannot be loaded."""

    def __init__(self, target: str, assistant: str, dtype: Dtype = "float32", device: str = "cpu") -> None:
        self._target, self._assistant = (
            load_model(LoadOptions(name, dtype=dtype, device=device)).model for name in (target, assistant)
        )
        self._tokenizer, self._assistant_tokenizer = (
            AutoTokenizer.from_pretrained(source_of(name), clean_up_tokenization_spaces=False)
            for name in (target, assistant)
        )
        self._settings = self._assistant.generation_config

    def outputs(
        self, prompts: Sequence[Sequence[int]], tokens: int, k: int | None, temperature: float
    ) -> tuple[Output, ...]:
        """One after another, of so many tokens each, which no end of text ends; raises what transformers raises where
        it fails. `prompts`: ids. `k`: drafted at once; None: its own rule."""
        outputs = []
        self._draft(k)
        for prompt in prompts:
            asked, came = time.monotonic(), Moments()
            ids = self._generate(prompt, tokens, temperature, came)
            outputs.append(Output(asked, tuple(came.found), came.found[-1], ids))
        return tuple(outputs)

    def _draft(self, k: int | None) -> None:
        """Sets how many tokens the assistant drafts at once."""
        self._assistant.generation_config = settings = copy.deepcopy(self._settings)
        if k is not None:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], tokens: int, temperature: float, came: Moments) -> tuple[int, ...]:
        inputs = torch.tensor([list(prompt)], device=self._target.device)
        drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=temperature > 0,
            **drawing,
            max_new_tokens=tokens,
            assistant_model=self._assistant,
            tokenizer=self._tokenizer,
            assistant_tokenizer=self._assistant_tokenizer,
            pad_token_id=0,
            eos_token_id=NEVER,
            streamer=came,
        )
        return tuple(output[0, inputs.shape[1] :].tolist())


class Theirs:
    """transformers' assisted generation in a thread of its own: one output after another, and so only a few.

    `bound`: whether a single one of torch's threads has the first core. `options`: with which the fastest number of
    draft tokens is found.
    """

    def __init__(self, pair: AssistedGeneration, threads: int, bound: bool, options: SamplingOptions) -> None:
        self.name = f"{ASSISTED}, {threads} {'threads' if threads > 1 else 'thread'}"
        self._pair, self._options = pair, options
        self._k: int | None = None  # draft tokens in a round; None: its own rule

        def begin() -> None:
            torch.set_num_threads(threads)  # of this thread, and of threads that have not computed yet
            if bound and threads == 1:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        self._thread = ThreadPoolExecutor(1, initializer=begin)

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs, by which the fastest number of draft tokens is found."""
        seconds: dict[int | None, float] = {}
        for self._k in KS:
            for tokens in (WARM_UP, 4 * WARM_UP):
                seconds[self._k] = (await self.run(prompts, tokens, 1, self._options)).seconds
        self._k = min(seconds, key=lambda k: seconds[k])
        self.name += f", {'its own K' if self._k is None else f'K = {self._k}'}"

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int, options: SamplingOptions) -> RunResult:
        before, began = time.process_time(), time.monotonic()
        asked = prompts[:ONE_BY_ONE], tokens, self._k, options.temperature
        try:
            outputs = await get_running_loop().run_in_executor(self._thread, self._pair.outputs, *asked)
        except (RuntimeError, ValueError, AttributeError) as error:  # the last: where every token is shared (5.23)
            raise CommandFailed(f"transformers failed: {error}") from error
        return RunResult(outputs, time.monotonic() - began, Work(time.process_time() - before))


Configuration = Ours | Theirs
