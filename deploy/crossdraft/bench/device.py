"""`crossdraft bench device`: throughput of models of real size on one accelerator, within a time limit.

The target is inflated where it runs, so that nothing large is read or written, and it accepts what the bundled one
accepts. Each measurement is a process of its own; those that do not fit into the time are left out, and named. All
findings are written after each of them.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
import transformers

from crossdraft.bench.commands import DevicePlan
from crossdraft.bench.harness import Advance, Benchmark, Table
from crossdraft.bench.throughput import concurrencies_of
from crossdraft.console.running import STARTS_PROCESSES, CommandFailed, Run, UsageError
from crossdraft.engine.device import device_of
from crossdraft.engine.names import ModelLoadError, size_of, source_of

SIZES = {  # of the bundled target, whose heads are 64 wide; parameters in bfloat16 take two bytes
    "1b": "inflated:16x2048x8192:bundled:target",
    "7b": "inflated:32x4096x11008:bundled:target",
    "14b": "inflated:52x4096x16384:bundled:target",
}
LEAST = 30.0  # seconds that must be left for a measurement to begin
GRACE = 5.0  # seconds in which a process may end by itself
WORDS = 2000  # characters of the last words of a process that failed
WARNING = "crossdraft: "  # prefix of the warnings of our own packages
SHARE = 0.4  # of the whole time that one measurement may take: one that hangs leaves time for others


@dataclass(frozen=True)
class Finding:
    """What is known of one measurement."""

    title: str
    text: str  # Markdown
    record: Any = None  # its JSON; None: there is none
    failed: bool = False


@dataclass(frozen=True)
class Step:
    """One measurement."""

    title: str
    arguments: tuple[str, ...]  # of `crossdraft bench`, without its files


class DeviceBenchmark(Benchmark[DevicePlan, Finding]):
    """What is measured."""

    unit = "measurements"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    @property
    def total(self) -> int:
        return len(steps_of(self))

    @property
    def models(self) -> dict[str, str]:
        """Names of the models by the sizes' names."""
        return {size: SIZES.get(size, size) for size in self.plan.size}

    def check(self) -> None:
        try:
            device_of(self.plan.device)
            for size, name in self.models.items():
                size_of(name)
                source_of(name)
                if name == size and "/" not in name and ":" not in name:
                    raise ModelLoadError(
                        f"there is no size {size!r}: give {', '.join(SIZES)}, a folder, a hub id, bundled:NAME or "
                        f"inflated:LAYERSxHIDDEN[xINTERMEDIATE]:NAME (--size)"
                    )
            source_of(self.plan.drafter)
        except ModelLoadError as error:
            raise UsageError(str(error)) from error
        assert self.at_once

    @property
    def at_once(self) -> tuple[int, ...]:
        """Outputs under way together; raises UsageError."""
        return concurrencies_of(self.plan.concurrency)

    async def measure(self, advance: Advance) -> AsyncGenerator[Finding, None]:
        yield Finding("The device", described(self.plan.device))
        ends = time.monotonic() + self.plan.seconds
        for step in steps_of(self):
            left = ends - time.monotonic() - GRACE
            if left < LEAST:
                yield Finding(step.title, f"Left out: {max(0, left):.0f} s were left, and it needs {LEAST:.0f}.")
            else:
                yield await run(step, min(left, max(LEAST, SHARE * self.plan.seconds)))
            advance()

    def report(self, results: Sequence[Finding]) -> Iterator[Table | str]:
        yield from (f"## {one.title}\n\n{one.text.strip()}" for one in results)

    def finish(self, results: Sequence[Finding]) -> None:
        failed = sum(one.failed for one in results)
        if failed:
            raise CommandFailed(f"{failed} of {self.total} measurements failed: the report says why")
        if not any(one.record for one in results):
            raise CommandFailed("nothing was measured in this time: the report says why")

    def run(self, json_path: Path | None = None, markdown_path: Path | None = None) -> None:
        """Measures; device.md and device.json are in the folder `output` if no other files are given."""
        self.check()
        folder = self.plan.output
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror}") from error
        super().run(json_path or folder / "device.json", markdown_path or folder / "device.md")


def described(name: str) -> str:
    """What the device of a name is, and the versions of what drives it."""
    device = torch.device(name)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        return f"{device}; {versions}"
    found = torch.cuda.get_device_properties(device)
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{found.name}, {found.total_memory >> 20} MiB; {versions}, {cuda}"


def steps_of(bench: DeviceBenchmark) -> list[Step]:
    """One for each size, in their order."""
    plan = bench.plan
    where = ("--device", plan.device, "--dtype", plan.dtype, "--cache-mib", str(plan.cache_mib))
    speeds = ("--concurrency", plan.concurrency, "--tokens", str(plan.tokens), "--drafter", plan.drafter)
    more = (*speeds, "--prompts", str(plan.prompts), *where, *(("--enforce-eager",) if plan.enforce_eager else ()))
    return [Step(size, ("throughput", "--target", name, *more)) for size, name in bench.models.items()]


async def run(step: Step, seconds: float) -> Finding:
    """One measurement, in a process that may take so long."""
    with TemporaryDirectory() as folder:
        table, record = Path(folder, "found.md"), Path(folder, "found.json")
        files = ("--json", str(record), "--markdown", str(table))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "crossdraft.cli", "bench", *step.arguments, *files, stdout=DEVNULL, stderr=PIPE
        )
        try:
            _, output = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            why = f"Broken off after {seconds:.0f} seconds: its time was over."
            return _broken_off(step, why, table, record)
        finally:
            await _end(process)
        said = output.decode("utf-8", "replace")
        if process.returncode:
            return Finding(step.title, f"Failed ({process.returncode}): {' '.join(said.split())[-WORDS:]}", failed=True)
        warnings = [line for line in said.splitlines() if line.startswith(WARNING)]
        return Finding(step.title, "\n\n".join([_text(table), *warnings]), json.loads(_text(record)))


def _broken_off(step: Step, why: str, table: Path, record: Path) -> Finding:
    """What it has written until then counts."""
    if not (record.is_file() and table.is_file()):
        return Finding(step.title, why)
    return Finding(step.title, f"{why} Until then:\n\n{_text(table)}", json.loads(_text(record)))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, on which a benchmark ends what it has started, and SIGKILL if that does not help."""
    if process.returncode is not None:
        return
    process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    if process.returncode is None:
        process.kill()
        await process.wait()
