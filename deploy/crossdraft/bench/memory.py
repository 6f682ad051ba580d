"""`crossdraft bench memory`: many sessions of all lengths through one engine, and what the process holds meanwhile."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from crossdraft.bench.harness import Advance, Benchmark, Columns, Table
from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest

MIB = 1 << 20
SAMPLES = 100  # in all
SHOWN = 10  # rows of the table
SHORTEST = 8  # tokens of a prompt
PREFIXES = 8  # texts that many sessions begin with
SHARED = 0.3  # of the sessions: the share that begins with one of them


@dataclass(frozen=True)
class Sample:
    """The state after some sessions have ended."""

    ended: int  # sessions so far
    seconds: float  # since the first one began
    resident: float  # MiB of this process
    held: int  # KV slots of live sessions
    live: int  # sessions with KV slots
    slots: int  # of the engine
    loaded: float  # MiB of this process before the first session


COLUMNS: Columns = {
    "sessions ended": lambda one: f"{one.ended:,}",
    "seconds": lambda one: f"{one.seconds:.0f}",
    "resident, MiB": lambda one: f"{one.resident:.0f}",
    "live sessions": lambda one: one.live,
    "KV slots held": lambda one: f"{one.held:,}",
    "of all slots": lambda one: f"{one.held / one.slots:.0%}",
}


@dataclass(frozen=True)
class Memory(Benchmark[Sample]):
    """What is done to an engine."""

    target: str  # a model's name
    mib: int  # for keys and values
    sessions: int  # in all
    at_once: int
    longest: int  # tokens of a session, those that are drawn included
    steps: int  # tokens that a session draws, at most
    seed: int

    unit = "sessions"

    @property
    def total(self) -> int:
        """Sessions."""
        return self.sessions

    def measure(self, advance: Advance) -> Iterator[Sample]:
        """Samples over time. Torch has one thread from here on."""
        torch.set_num_threads(1)
        try:
            model = load_model(self.target, max_length=self.longest).model
            pack(model)  # as a service runs it
            engine = Engine(model, self.longest, self.mib)
            engine.populate()
            yield from self.samples(engine, advance)
        except NumberOutOfRangeError as error:
            raise UsageError(str(error)) from error
        except (ModelLoadError, ValueError) as error:
            raise CommandFailed(str(error)) from error

    def samples(self, engine: Engine, advance: Advance) -> Iterator[Sample]:
        """Runs all sessions to their ends, some at once; samples in even distances, the last one after all sessions."""
        every = max(1, self.sessions // SAMPLES)
        loaded, began, ended = resident(), time.monotonic(), 0
        waiting, live = self._sessions(engine.vocabulary_size), list[_Session]()
        while live or ended < self.sessions:
            live += [one for _, one in zip(range(self.at_once - len(live)), waiting, strict=False)]
            logits = engine.forward([ForwardRequest(one.name, one.ids) for one in live])
            for one, row in zip(live, logits, strict=True):
                one.ids, one.left = (*one.ids, int(row.argmax())), one.left - 1
            for one in [one for one in live if not one.left]:
                engine.close(one.name)
                live.remove(one)
                ended += 1
                advance()
                if ended % every == 0 or ended == self.sessions:
                    state = (resident(), engine.slots_in_use, engine.sessions, engine.slots)
                    yield Sample(ended, time.monotonic() - began, *state, loaded)

    def _sessions(self, vocabulary: int) -> Iterator["_Session"]:
        """Lengths are drawn uniformly on a logarithmic scale; ids uniformly."""
        random = np.random.default_rng(self.seed)

        def text(size: int) -> tuple[int, ...]:
            return tuple(random.integers(vocabulary, size=size).tolist())

        prefixes = [text(self.longest) for _ in range(PREFIXES)]
        for name in range(self.sessions):
            steps = int(random.integers(1, self.steps + 1))
            longest = self.longest - steps
            size = int(np.exp(random.uniform(np.log(SHORTEST), np.log(longest + 1))))
            shared = int(random.integers(size)) if random.random() < SHARED else 0
            prefix = prefixes[int(random.integers(PREFIXES))][:shared]
            yield _Session(name, prefix + text(size - shared), steps)

    def report(self, results: Sequence[Sample]) -> Iterator[Table | str]:
        """A table of some samples, and a summary."""
        step = max(1, len(results) // SHOWN)
        yield Table.of(results[step - 1 :: step], COLUMNS)
        last, most = results[-1], max(sample.held for sample in results)
        yield (
            f"Budget {self.mib} MiB, {last.slots:,} KV slots. The process had {last.loaded:.0f} MiB before the first "
            f"session, and grew by {grown(results):.1f} MiB from a tenth of the sessions to the end. At most {most:,} "
            f"slots were held, and {last.held:,} after the last session."
        )


def grown(samples: Sequence[Sample]) -> float:
    """MiB that the process has more at the end than after a tenth of the sessions."""
    return samples[-1].resident - samples[len(samples) // 10].resident


@dataclass
class _Session:
    name: int
    ids: tuple[int, ...]
    left: int  # tokens to draw


def resident() -> float:
    """MiB of this process in main memory; 0.0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
