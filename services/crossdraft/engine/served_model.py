"""A model as a service runs it: loaded, in its thread, with its letters and its noise."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.engine import BUDGET, Engine
from crossdraft.engine.loader import LoadedModel, Pruning, load_model
from crossdraft.engine.model_thread import ModelThread, Stepping
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.engine.requests import Share, Work
from crossdraft.engine.runner import pack
from crossdraft.engine.sampler import Clocks
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import Description
from crossdraft.types.rows import Ids
from crossdraft.types.statistics import ModelStatistics
from crossdraft.verification.noise import KeyedNoise

# Steps that take their time: a device that this machine has not, emulated by sleeping. No torch.


@dataclass(frozen=True)
class Pace:
    """A step of n tokens ends no sooner than base + each * n milliseconds after it began.

    n counts what the step feeds: the tokens that the text went on with since the session's last answer and the nodes of
    its tree, over all sessions that share the step. A text of which no pass was answered here, be it a prompt or a
    session that was lost elsewhere, does not count: its first answer costs base + each * (nodes of the tree), however
    many steps it took, and a step that only feeds such texts and answers nobody takes as long as it takes.

    Raises:
        ValueError: a number is negative or not finite.
    """

    base: float  # ms
    each: float  # ms for each token

    def __post_init__(self) -> None:
        if not all(number >= 0 and math.isfinite(number) for number in (self.base, self.each)):
            raise ValueError(f"a pace needs two numbers of milliseconds, 0 or more, got {self.base:g},{self.each:g}")

    @staticmethod
    def parsed(text: str) -> "Pace":
        """From A,B as on a command line; raises ValueError."""
        parts = text.split(",")
        try:
            base, each = map(float, parts)
        except ValueError as error:
            raise ValueError(f"a pace is A,B, two numbers of milliseconds such as 20,0.5, got {text}") from error
        return Pace(base, each)

    def __str__(self) -> str:
        return f"{self.base:g},{self.each:g}"

    def seconds(self, tokens: int) -> float:
        """That a step of so many tokens takes at least."""
        return (self.base + self.each * tokens) / 1000


def check_sigma(sigma: float) -> None:
    """Raises ValueError unless it is a standard deviation."""
    if not 0 <= sigma < math.inf:
        raise ValueError(f"the noise on the logits needs a standard deviation of 0 or more, got {sigma:g}")


@dataclass(frozen=True)
class Emulation:
    """What makes a service unlike its model, for benchmarks.

    Raises:
        ValueError: the noise is negative or not finite.
    """

    pace: Pace | None = None  # of its steps; None: as fast as they are
    logit_noise: float = 0.0  # standard deviation of noise on its logits

    def __post_init__(self) -> None:
        check_sigma(self.logit_noise)

    @property
    def marks(self) -> dict[str, str | float]:
        """What a service's ready line must say, so that results can be labelled."""
        paced: dict[str, str | float] = {} if self.pace is None else {"paced": str(self.pace)}
        return paced | ({"logit_noise": self.logit_noise} if self.logit_noise else {})


NOTHING_EMULATED = Emulation()


@dataclass(frozen=True)
class ModelOptions:
    """Which model a service runs, and with what; checked when it is loaded."""

    name: str  # a folder, a hub id, or `bundled:` and the name of a bundled model
    dtype: str = "auto"
    device: str = "cpu"
    budget: int = BUDGET  # MiB for keys and values of all sessions
    max_length: int | None = None  # tokens of a session; None: the model's own context
    trust_remote_code: bool = False
    threads: int | None = None  # of torch, in the whole process; None: torch's own choice
    pruning: Pruning | None = None  # of a drafter: the ids that its head keeps; None: all
    emulation: Emulation = NOTHING_EMULATED
    reuse: bool = True  # a session may begin with what another one has fed of the same text
    eager: bool = False  # no forward is captured as a CUDA graph; elsewhere none is in any case


@dataclass(frozen=True, eq=False)
class RunningModel:
    """What all sessions of a service share."""

    thread: ModelThread
    tokenization: Tokenization
    noise: KeyedNoise  # of the vocabulary
    description: Description
    kept: Ids | None = None  # the id of each column of its logits, ascending; None: every id has one

    @staticmethod
    def of(
        loaded: LoadedModel,
        side: Side,
        budget: int = BUDGET,
        emulation: Emulation = NOTHING_EMULATED,
        reuse: bool = True,
        eager: bool = False,
    ) -> "RunningModel":
        """Puts a loaded model to work; it is changed, and for the engine only from here on.

        Args:
            loaded: the model.
            side: whose vocabulary it is in a pair.
            budget: MiB for keys and values of all sessions.
            emulation: what it is to be unlike.
            reuse: whether a session may begin with what another one has fed of the same text.
            eager: whether no forward is to be captured as a CUDA graph.

        Raises:
            ValueError: the budget does not hold one session, or the engine or the text layer cannot run this model.
        """
        about = loaded.description
        vocabulary = Vocabulary.build(about.tokenizer_json, about.vocabulary_size, about.controls, about.stops, side)
        pack(loaded.model)
        engine = Engine(loaded.model, about.context, budget, reuse=reuse, static=False if eager else None)
        return RunningModel(
            ModelThread(engine, _stepping(engine, loaded, emulation)),
            Tokenization(about.tokenizer_json, vocabulary),
            KeyedNoise.of(vocabulary),
            about,
            loaded.kept,
        )

    @cached_property
    def clocks(self) -> Clocks:
        """The noise of each column of its logits, beside them."""
        return Clocks(self.noise, self.thread.engine.device, self.kept)

    def columns(self, allowed: Ids | None) -> Ids | None:
        """The columns of logits whose ids are among `allowed` (None: all); None: every column."""
        if self.kept is None or allowed is None:
            return allowed
        return np.flatnonzero(np.isin(self.kept, allowed))

    def ids(self, columns: Ids) -> Ids:
        """The ids that columns of logits stand for, in the same shape."""
        return columns if self.kept is None else self.kept[columns]

    def statistics(self) -> ModelStatistics:
        """What the model has done so far. May be called from any thread."""
        thread = self.thread
        engine = thread.engine
        return ModelStatistics(
            steps=thread.steps,
            seconds=thread.seconds,
            batches=dict(thread.batches),
            tokens=engine.fed,
            kv_slots=engine.places,
            kv_slots_used=engine.held,
            requests=thread.answers,
            queued_seconds=thread.queued,
            evictions=thread.evictions,
        )

    def close(self) -> None:
        """Ends the thread when its jobs are done."""
        self.thread.close()


def _stepping(engine: Engine, loaded: LoadedModel, emulation: Emulation) -> Stepping:
    """The engine's step, noisy and paced where that is asked for."""
    step: Stepping = engine.step
    if emulation.logit_noise:
        columns = loaded.description.vocabulary_size if loaded.kept is None else len(loaded.kept)
        step = Noisy(emulation.logit_noise, columns, step, engine.device)
    return step if emulation.pace is None else Paced(emulation.pace, engine, step)


def run_model(options: ModelOptions, side: Side) -> RunningModel:
    """Loads a model and puts it to work; takes seconds. Raises ValueError with a text that says what to change."""
    if options.threads is not None:
        if options.threads < 1:
            raise NumberOutOfRangeError(f"threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    loaded = load_model(
        options.name, options.dtype, options.device, options.max_length, options.trust_remote_code, options.pruning
    )
    running = RunningModel.of(loaded, side, options.budget, options.emulation, options.reuse, options.eager)
    try:
        running.thread.engine.populate()
    except NumberOutOfRangeError:
        running.close()
        raise
    return running


# Noise on a model's logits: a drafter of any acceptance, made of one that agrees with the target.

LATEST = 8  # tokens that the noise depends on, besides the number of tokens before
WINDOWS = 1 << 16
SEED = 20251121


class Noisy:
    """A step whose logits have Gaussian noise of mean 0, before anything else is done with them.

    The noise is a function of how many tokens come before and of the latest of them: the same node has the same
    logits whenever it is evaluated, in whatever session or tree, so this is a model like any other, and rows state its
    distributions truthfully. Each node takes its own window of one long vector that was drawn beforehand, a copy in
    place of V draws.

    The bundled target as its own drafter accepts, by `standard` at temperature 1 with rows of 64 ids (of all ids), 0.91
    (1.00) at sigma 0, 0.82 (0.86) at 0.5, 0.70 (0.73) at 1, 0.59 (0.61) at 1.5, 0.49 (0.51) at 2, 0.32 (0.33) at 3.

    Args:
        sigma: standard deviation, of logits at temperature 1.
        columns: of the logits.
        step: whose logits they are.
        device: where they are.

    Raises:
        ValueError: sigma is negative or not finite.
    """

    def __init__(
        self,
        sigma: float,
        columns: int,
        step: Callable[[Sequence[Share]], list[Tensor | None]],
        device: torch.device,
    ) -> None:
        check_sigma(sigma)
        drawn = np.random.default_rng(SEED).standard_normal(columns + WINDOWS - 1, dtype=np.float32)
        self._noise = torch.from_numpy(drawn).mul_(sigma).to(device)
        self._windows = self._noise.unfold(0, columns, 1)  # (WINDOWS, columns), a view
        self._step = step

    @torch.inference_mode()
    def __call__(self, shares: Sequence[Share]) -> list[Tensor | None]:
        """Logits for each share as the step gives them, and noise; raises what it raises."""
        return [
            logits if logits is None or not len(logits) else logits + self._of(share.work)
            for share, logits in zip(shares, self._step(shares), strict=True)
        ]

    def _of(self, work: Work) -> Tensor:
        """Shape (rows, columns)."""
        end, before = work.context[-LATEST:], len(work.context)
        every = list(work.tree.paths()) if work.rows() else []
        return torch.stack(
            [self._windows[_window(before + len(p), (*end, *p))] for p in map(every.__getitem__, work.rows())]
        )


def _window(count: int, tokens: tuple[int, ...]) -> int:
    """Where the noise begins after `count` tokens that end with `tokens`."""
    key = np.array((count, *tokens[-LATEST:]), dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % WINDOWS


Logits = TypeVar("Logits")
MOST_KNOWN = 4096  # sessions whose texts are told from those that are new


class Counting(Protocol):
    """What knows the tokens of a step."""

    def due(self, work: Work) -> int:
        """Tokens that would be fed for a request now."""
        ...


@dataclass(frozen=True)
class Clock:
    """Seconds that pass while a thread sleeps."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep  # the model thread only: it stands for a device that is busy


class Paced(Generic[Logits]):
    """A step that takes at least what its pace says; the rest is slept where it is called."""

    def __init__(
        self,
        pace: Pace,
        engine: Counting,
        step: Callable[[Sequence[Share]], list[Logits | None]],
        clock: Clock = Clock(),
    ) -> None:
        self._pace, self._engine, self._step, self._clock = pace, engine, step, clock
        self._known: OrderedDict[Hashable, int] = OrderedDict()  # tokens of a session's text at its last answer

    def __call__(self, shares: Sequence[Share]) -> list[Logits | None]:
        """What the step gives; raises what it raises."""
        began = self._clock.now()
        tokens = sum(map(self._paid, shares))
        found = self._step(shares)
        for share, logits in zip(shares, found, strict=True):
            if logits is not None:
                self._remember(share.work)
        if tokens or any(logits is not None for logits in found):
            rest = began + self._pace.seconds(tokens) - self._clock.now()
            if rest > 0:
                self._clock.sleep(rest)
        return found

    def _paid(self, share: Share) -> int:
        """Tokens of a share that count: those that do not are fed first."""
        work, due = share.work, self._engine.due(share.work)
        known = self._known.get(work.session)
        counted = len(work.tree) + (0 if known is None else max(1, len(work.context) - known))
        free = max(0, due - counted)
        return max(0, min(share.tokens, due) - free)

    def _remember(self, work: Work) -> None:
        self._known[work.session] = len(work.context)
        self._known.move_to_end(work.session)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
