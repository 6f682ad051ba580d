"""A model as a service runs it: loaded, in its thread, with its letters and its noise."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from crossdraft.models.clocks import Clocks
from crossdraft.models.engine import BUDGET, Engine
from crossdraft.models.loading import LoadedModel, load_model
from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.models.noising import Noisy, check_sigma
from crossdraft.models.pacing import Pace, Paced
from crossdraft.models.packing import pack
from crossdraft.models.pruning import Pruning
from crossdraft.models.use import Use
from crossdraft.models.worker import ModelThread, Stepping
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import Description
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids


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

    def use(self) -> Use:
        """What the model has done so far. May be called from any thread."""
        thread = self.thread
        engine = thread.engine
        return Use(
            steps=thread.steps,
            seconds=thread.seconds,
            batches=dict(thread.batches),
            tokens=engine.fed,
            places=engine.places,
            held=engine.held,
            answers=thread.answers,
            queued=thread.queued,
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
