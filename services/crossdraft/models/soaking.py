"""Many sessions of all lengths through one engine: what it holds meanwhile, and how much memory the process has."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.models.loading import load_model
from crossdraft.models.packing import pack

SHORTEST = 8  # tokens of a text
PREFIXES = 8  # texts that many sessions begin with
SHARED = 0.3  # of the sessions, those that begin with one of them
MIB = 1 << 20


@dataclass(frozen=True)
class Soaking:
    """What is done to an engine."""

    sessions: int  # in all
    at_once: int
    longest: int  # tokens of a session, those that are drawn included
    steps: int  # tokens that a session draws, at most
    seed: int


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
        logits = engine.forward([Work(one.name, one.ids) for one in live])
        for one, row in zip(live, logits, strict=True):
            one.ids, one.left = (*one.ids, int(row.argmax())), one.left - 1
        for one in [one for one in live if not one.left]:
            engine.close(one.name)
            live.remove(one)
            ended += 1
            if ended % every == 0:
                seconds = time.monotonic() - began
                samples.append(Sample(ended, seconds, resident(), engine.held, engine.taken))
    return Soaked(engine.places, loaded, tuple(samples), engine.held)


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
