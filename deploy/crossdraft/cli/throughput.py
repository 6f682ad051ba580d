"""`crossdraft bench throughput`: many outputs at once, beside transformers' own generation on the same models.

Each model has one process and one thread of torch unless more are asked for; on a CPU the target has the first core,
the drafter the second one, and this process runs where there is room. What is compared with has the target's core.
Where models are on another device nobody is bound to a core. Ways take turns, one running while the others are idle.
"""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from crossdraft.cli.benching import write_json, write_text
from crossdraft.cli.failures import Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_stage import on_core
from crossdraft.cli.paired import rotated
from crossdraft.cli.processes import Startable, Wanted, running
from crossdraft.cli.progress import counted
from crossdraft.cli.running import STARTS_PROCESSES, checked_options, run_to_end
from crossdraft.cli.throughput_figures import Measured, Run, measured
from crossdraft.cli.throughput_report import report
from crossdraft.cli.throughput_runs import ALONE, WARM_UP, Ids, Ours, Theirs, Way
from crossdraft.cli.transformers_process import ASSISTED, BATCHED, TransformersProcess
from crossdraft.pipeline import GenerationRequest, SamplingOptions, connect
from crossdraft.rpc.heap import settle

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
        with counted(len(plan.at_once) * plan.repeat * len(stage.ways), "runs") as advance:
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


def _write(found: Sequence[Measured], plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    if markdown_path is not None:
        write_text(markdown_path, report(found, _conditions(plan)))
    if json_path is not None:
        shown = asdict(replace(plan, texts=())) | {"texts": len(plan.texts)}
        write_json(json_path, {"plan": shown, "measured": [asdict(one) for one in found]})


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
        settle()
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
