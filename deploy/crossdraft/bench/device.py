"""`crossdraft bench device`: passes and throughput of models of real size on one accelerator, within a time limit.

The target is inflated where it runs, so that nothing large is read or written, and it accepts what the bundled one
accepts. Each measurement is a process of its own; what no longer fits into the time is left out, and said. All that
is known is written after each of them.
"""

import asyncio
import copy
import json
import shutil
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from crossdraft.bench.engine import pass_times
from crossdraft.bench.harness import print_table, write_json, write_text
from crossdraft.console.running import STARTS_PROCESSES, CommandFailed, Misused, counted, run_to_end
from crossdraft.engine.loader import CannotInflateError, grown, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError, Size, size_of, source_of
from crossdraft.engine.packed_linear import pack

SIZES = {  # of the bundled target, whose heads are 64 wide; parameters in bfloat16 take two bytes
    "1b": "inflated:16x2048x8192:bundled:target",
    "7b": "inflated:32x4096x11008:bundled:target",
    "14b": "inflated:52x4096x16384:bundled:target",
}
LEAST = 30.0  # seconds that a measurement is begun with
GRACE = 5.0  # seconds in which a process may end by itself
LOADS = ("1x1", "1x6", "16x1", "16x6", "64x1")
FAILED = "Failed"  # how the section of a measurement begins that did
WORDS = 2000  # letters of what a process that failed said last
WARNING = "crossdraft: "  # how the lines begin in which our own packages warn
SHARE = 0.4  # of all the time that one measurement may take: one that hangs keeps only some of the others from it


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: tuple[str, ...]  # of SIZES, or names of models
    drafter: str
    device: str
    dtype: str
    concurrency: str  # as `bench throughput` has it
    tokens: int  # of each output
    turns: int  # of each pass
    mib: int  # for keys and values
    seconds: float  # for all of it
    prompts: Path
    enforce_eager: bool = False

    @property
    def models(self) -> dict[str, str]:
        """Names by what they are called."""
        return {size: SIZES.get(size, size) for size in self.sizes}

    def check(self) -> None:
        """Raises Misused for what no measurement could use, before any is begun."""
        from crossdraft.engine.device import device_of

        try:
            device_of(self.device)
            for size, name in self.models.items():
                size_of(name)
                source_of(name)
                if name == size and "/" not in name and ":" not in name:
                    raise ModelLoadError(
                        f"there is no size {size!r}: give {', '.join(SIZES)}, a folder, a hub id, bundled:NAME or "
                        f"inflated:LAYERSxHIDDEN[xINTERMEDIATE]:NAME (--size)"
                    )
            source_of(self.drafter)
        except ModelLoadError as error:
            raise Misused(str(error)) from error
        if min(self.at_once) < 1:
            raise Misused(f"--concurrency must be numbers from 1 on with commas between, got {self.concurrency!r}")

    @property
    def at_once(self) -> tuple[int, ...]:
        """Outputs under way together; 0 stands for what is no number."""
        return tuple(int(part) if part.strip().isdecimal() else 0 for part in self.concurrency.split(","))


@dataclass(frozen=True)
class Step:
    """One measurement."""

    title: str
    arguments: tuple[str, ...]  # of `crossdraft bench`, without its files


@dataclass(eq=False)
class Findings:
    """What is known so far."""

    plan: Plan
    folder: Path
    records: dict[str, object] = field(default_factory=dict)  # by title; None: it has none
    sections: list[str] = field(default_factory=list)

    def add(self, title: str, text: str, record: object = None) -> None:
        """Takes note of it, and writes all; raises CommandFailed."""
        self.sections.append(f"## {title}\n\n{text.strip()}\n")
        self.records[title] = record
        write_text(self.folder / "device.md", "\n".join(self.sections))
        shown = asdict(self.plan) | {"prompts": str(self.plan.prompts)}
        write_json(self.folder / "device.json", {"plan": shown, "measured": self.records})


def steps_of(plan: Plan) -> list[Step]:
    """In their order: all sizes' passes come before the throughput of any."""
    eager = ("--enforce-eager",) if plan.enforce_eager else ()
    where = ("--device", plan.device, "--dtype", plan.dtype, "--cache-mib", str(plan.mib), *eager)
    most = max(plan.at_once)
    fitting = [load for load in LOADS if int(load.partition("x")[0]) <= most]
    loads = tuple(part for load in fitting for part in ("--load", load))
    turns = ("--turns", str(plan.turns))
    speeds = ("--concurrency", plan.concurrency, "--tokens", str(plan.tokens), "--drafter", plan.drafter)
    prompts = ("--prompts", str(plan.prompts))
    models = plan.models.items()
    passes = [Step(f"{size}: a pass", ("engine", "--target", name, *loads, *turns, *where)) for size, name in models]
    outputs = [
        Step(f"{size}: many outputs", ("throughput", "--target", name, *speeds, *prompts, *where))
        for size, name in models
    ]
    return passes + outputs


def measure(plan: Plan, folder: Path) -> None:
    """Measures what fits into the time; the text on stdout, and it and JSON in a folder.

    Raises:
        Misused: there is no such size or device, or the folder cannot be made.
        CommandFailed: some of it failed, or nothing was measured.
    """
    from crossdraft.bench.engine import described

    plan.check()
    steps = steps_of(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misused(f"cannot make {folder}: {error.strerror}") from error
    findings = Findings(plan, folder)
    findings.add("The device", described(plan.device))
    run_to_end(_measure(steps, findings), STARTS_PROCESSES)
    failed = sum(section.partition("\n\n")[2].startswith(FAILED) for section in findings.sections)
    if failed or not any(findings.records.values()):
        what = f"{failed} of {len(steps)} measurements failed" if failed else "nothing was measured in this time"
        raise CommandFailed(f"{what}: {folder / 'device.md'} says why")


async def _measure(steps: Sequence[Step], findings: Findings) -> None:
    ends = time.monotonic() + findings.plan.seconds
    with counted(len(steps), "measurements") as advance:
        for number, step in enumerate(steps):
            left = ends - time.monotonic() - GRACE
            if left < LEAST:
                findings.add(step.title, f"Left out: {max(0, left):.0f} s were left, and it is begun with {LEAST:.0f}.")
            else:
                most = max(LEAST, SHARE * findings.plan.seconds)
                await _take(step, number, min(left, most), findings)
            print(findings.sections[-1], flush=True)
            advance()


async def _take(step: Step, number: int, seconds: float, findings: Findings) -> None:
    """One measurement, or why there is none."""
    paths = {kind: findings.folder / f"{number}.{kind}" for kind in ("json", "md")}
    files = ("--json", str(paths["json"]), "--markdown", str(paths["md"]))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crossdraft.cli", "bench", *step.arguments, *files, stdout=DEVNULL, stderr=PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        _broken_off(step, seconds, paths, findings)
        return
    finally:
        await _end(process)
    if process.returncode:
        words = " ".join(said.decode("utf-8", "replace").split())[-WORDS:]
        findings.add(step.title, f"{FAILED} ({process.returncode}): {words}")
        return
    warned = [line for line in said.decode("utf-8", "replace").splitlines() if line.startswith(WARNING)]
    record = json.loads(paths["json"].read_text(encoding="utf-8"))
    findings.add(step.title, "\n\n".join([paths["md"].read_text(encoding="utf-8"), *warned]), record)
    for path in paths.values():
        path.unlink()


def _broken_off(step: Step, seconds: float, paths: dict[str, Path], findings: Findings) -> None:
    """The time was over: what it has written until then counts."""
    why = f"Broken off after {seconds:.0f} seconds: its time was over."
    written = all(path.is_file() for path in paths.values())
    if not written:
        findings.add(step.title, why)
        return
    record = json.loads(paths["json"].read_text(encoding="utf-8"))
    findings.add(step.title, f"{why} Until then:\n\n{paths['md'].read_text(encoding='utf-8')}", record)
    for path in paths.values():
        path.unlink()


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, on which a bench ends what it has started, and SIGKILL if that does not help."""
    if process.returncode is not None:
        return
    process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    if process.returncode is None:
        process.kill()
        await process.wait()


# `crossdraft bench inflate`: a costlier model with the same function.

MILLISECONDS = 1000.0
TOKENS = (1, 2, 5, 9, 17)  # of a pass: one that was committed, and 0, 1, 4, 8, 16 nodes
TURNS = 15
COLUMNS = ("model", "parameters", *(f"{count} token{'s'[: count - 1]}" for count in TOKENS))


def make(name: str, size: Size, folder: Path) -> None:
    """Writes the larger model, and says how much it may differ and what its passes cost.

    Raises:
        Misused: the folder holds something, or the shape is smaller than the model.
        CommandFailed: the model cannot be loaded, inflated or written.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise Misused(f"{folder} holds something already: give a folder that is empty or new")
    with _failures():
        inflated = inflate(name, size)
        inflated.save(name, folder)
        rows = []
        for shown, model in (("original", inflated.original), ("larger", inflated.model)):
            parameters = sum(parameter.numel() for parameter in model.parameters())
            pack(model)  # as a service runs it
            times = pass_times(model, [count - 1 for count in TOKENS], TURNS)
            rows.append((shown, f"{parameters / 1e6:.1f}M", *(f"{MILLISECONDS * time:.1f}" for time in times)))
    print(f"Largest difference between logits on random prompts: {inflated.difference:.1e}")
    print_table("Processor milliseconds of a pass, one thread", COLUMNS, rows)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except ModelLoadError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the larger model cannot be written: {error}") from error


# A costlier model that computes the same function, made and saved: for measuring speed with real acceptance.

TOLERANCE = 1e-4  # between two logits, in float32
PROBES, LENGTH = 4, 24  # random prompts that both models are compared on, and their tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class Inflated:
    """A model and the larger one that computes the same."""

    original: PreTrainedModel
    model: PreTrainedModel
    difference: float  # largest, between logits on random prompts

    def save(self, name: str, folder: Path) -> None:
        """Writes a folder as transformers does, with the tokenizer and the generation settings of `name`.

        In float16 where that loses nothing, as when `hidden` is 4 or 16 times what it was; else in float32.
        """
        exact = all(bool((tensor.half() == tensor).all()) for tensor in self.model.parameters())
        (copy.deepcopy(self.model).half() if exact else self.model).save_pretrained(folder)
        for file in TOKENIZER_FILES:
            found = cached_file(source_of(name), file, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, folder / file)


def inflate(name: str, size: Size) -> Inflated:
    """The model `name` (a folder, a hub id or `bundled:NAME`) in a larger shape, both in float32.

    Raises:
        ModelLoadError: it cannot be loaded.
        NumberOutOfRangeError: the shape is smaller than the model.
        CannotInflateError: its architecture is not Llama, or the larger model's logits are not the same.
    """
    original = load_model(name, "float32").model
    model = grown(original, size)
    difference = largest_difference(original, model)
    if not difference <= TOLERANCE:
        raise CannotInflateError(
            f"the larger model's logits differ from those of {name} by up to {difference:.2g}, and only {TOLERANCE:g} "
            "is allowed: something in its configuration is not known here"
        )
    return Inflated(original, model, difference)


@torch.inference_mode()
def largest_difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Between the logits of two models on the same random prompts."""
    return max(
        float((one(ids, use_cache=False).logits - other(ids, use_cache=False).logits).abs().max())
        for ids in _prompts(one.config.vocab_size)
    )


def _prompts(vocabulary: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        yield torch.randint(vocabulary, (1, LENGTH), generator=generator)
