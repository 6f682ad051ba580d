"""A model as a service runs it: loaded, in its thread, with its tokenization and its noise."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from crossdraft.config.engine import EngineOptions
from crossdraft.engine.compilation import pack
from crossdraft.engine.device import device_of
from crossdraft.engine.eagle.engine import EagleEngine, StateLayer
from crossdraft.engine.engine import Engine
from crossdraft.engine.kv_cache import MemoryShare
from crossdraft.engine.loader import FollowingHead, LoadedModel, LoadOptions, fingerprint, load_model
from crossdraft.engine.model_thread import ModelThread, StepFunction
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.sampling.paths import TREE_WIDTHS, StandingTrees
from crossdraft.engine.sequential_engine import engine_of
from crossdraft.session.models import tokenization_of
from crossdraft.text.grammar import GrammarCompiler
from crossdraft.text.letters import NOTHING, Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Description
from crossdraft.types.rows import Ids
from crossdraft.types.statistics import ModelStatistics
from crossdraft.verification.noise import KeyedNoise

log = logging.getLogger(__name__)
SEEN = 8  # tokens of a text that are looked at, for each column that follows the text

# Is called when a model is loaded and has no KV cache yet, with its device, and bytes of a token in that cache: makes
# what is to have memory beside it.
MakeBeside = Callable[[torch.device, int], object]


class Emulation(Protocol):
    """How a service differs from its model; whoever measures injects it (`crossdraft.lab.emulation.steps`)."""

    @property
    def marks(self) -> Mapping[str, str | float]:
        """What the ready line says of it."""

    def step_of(self, engine: Engine, columns: int) -> StepFunction:
        """What is run in place of the engine's step, whose logits have so many columns."""


@dataclass(frozen=True)
class ModelOptions(LoadOptions):
    """Which model a service runs, and with what."""

    sessions: int = MemoryShare.sessions  # at once, which bounds a KV cache whose size is not named
    token_bytes_beside: int = 0  # as of `MemoryShare`
    emulation: Emulation | None = None

    @staticmethod
    def of(name: str, given: EngineOptions, sessions: int = MemoryShare.sessions) -> "ModelOptions":
        """A model with these options, and those of a target or a drafter that are among them; raises ValueError."""
        known = {one.name: getattr(given, one.name) for one in fields(LoadOptions) if hasattr(given, one.name)}
        return ModelOptions(**known | {"name": name}, sessions=sessions)

    @property
    def budget(self) -> int | MemoryShare:
        """MiB for keys and values of all sessions."""
        return self.cache_mib or MemoryShare(self.gpu_memory_utilization, self.sessions, self.token_bytes_beside)

    @property
    def graph_sizes(self) -> tuple[int, ...] | None:
        """As of `Engine`; without any the model is not compiled, either."""
        return () if self.enforce_eager else self.cuda_graph_sizes or None

    @property
    def marks(self) -> Mapping[str, str | float]:
        """Of the ready line, so that results of a service that is emulated are labelled."""
        return {} if self.emulation is None else self.emulation.marks

    def beside(self, device: torch.device, token_bytes: int) -> "ModelOptions":
        """The same, where another model has a KV cache made later (as `MakeBeside`): both hold about as many tokens."""
        there = torch.empty(0, device=device_of(self.device)).device == device
        return replace(self, token_bytes_beside=token_bytes) if there else self


class TextColumns:
    """The columns of a cut head that follow the text: those ids have them that texts have used last (`FollowingHead`).

    Args:
        head: of the model.
        clocks: of its columns, which say whose they are.
    """

    def __init__(self, head: FollowingHead, clocks: Clocks) -> None:
        assert clocks.kept is not None
        self._head, self._clocks = head, clocks
        self.first = len(clocks.kept) - head.room
        self._static = frozenset(clocks.kept[: self.first].tolist())
        # Longest unused first.
        self._places = {id: place for place, id in enumerate(clocks.kept[self.first :].tolist())}

    def follow(self, ids: Sequence[int]) -> None:
        """Gives columns to the ids that a text ends with; called in the model thread.

        That is between steps: a draft token and its row name the ids of the same columns. Scores, which are computed
        later, would not, and are refused.
        """
        recent = [id for id in dict.fromkeys(ids[: -SEEN * self._head.room - 1 : -1]) if id not in self._static]
        new: dict[int, int] = {}
        for id in recent[self._head.room - 1 :: -1]:
            place = self._places.pop(id, None)
            if place is None:
                place = new[id] = self._places.pop(next(iter(self._places)))
            self._places[id] = place
        if new:
            self._head.give([*new.values()], [*new])
            self._clocks.give([self.first + place for place in new.values()], [*new])


@dataclass(frozen=True, eq=False)
class RunningModel:
    """What all sessions of a service share."""

    thread: ModelThread
    tokenization: Tokenization
    clocks: Clocks  # of the columns of its logits, by the noise of the vocabulary
    description: Description
    text_columns: TextColumns | None = None  # None: every column stays that of its id
    end: Callable[[], None] = lambda: None  # ends what runs beside its thread

    @staticmethod
    def of(loaded: LoadedModel, side: Side, options: ModelOptions) -> "RunningModel":
        """Starts a loaded model in a thread; it is changed, and only the engine may use it from here on. Raises
        ValueError: the budget does not hold one session, or the engine or the text layer cannot run this model."""
        about = loaded.description
        tokenization, head = tokenization_of(about, side), loaded.model.get_output_embeddings()
        pack(loaded.model)
        engine: Engine
        if loaded.fusion is not None:
            if side is Side.TARGET:
                raise ModelLoadError(f"{about.model} reads the hidden states of a target: it can only draft")
            engine = EagleEngine(StateLayer.of(loaded.model, loaded.fusion), options.max_model_len, options.budget)
        else:
            reuse, sizes = options.enable_prefix_caching, options.graph_sizes
            engine = engine_of(loaded.model, options.max_model_len, options.budget, reuse=reuse, graph_sizes=sizes)
        columns = about.vocabulary_size if loaded.kept is None else len(loaded.kept)
        step = None if options.emulation is None else options.emulation.step_of(engine, columns)
        identity = fingerprint(about, loaded.weights if side is Side.TARGET else "")
        reads = side is Side.TARGET or loaded.fusion is not None
        size = engine.hidden_size if reads else 0
        about = replace(about, context=engine.max_length, fingerprint=identity, hidden_size=size)
        letters = tokenization.vocabulary.letters
        clocks = Clocks(KeyedNoise.of(tokenization.vocabulary), engine.device, loaded.kept, [*map(len, letters)])
        if side is Side.DRAFTER and engine.follows and engine.runner.graphs is not None:
            trees = [StandingTrees(width, clocks, letters) for width in TREE_WIDTHS]
            engine.runner.graphs.capture_drawing(clocks, trees)
        return RunningModel(
            # A step of the drafter's is short, and what a pass of the target on the same device waits for.
            ModelThread(engine, step, f"{side.name.lower()} model", priority=-1 if side is Side.DRAFTER else 0),
            tokenization,
            clocks,
            about,
            TextColumns(head, clocks) if isinstance(head, FollowingHead) else None,
        )

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """For the columns of its logits, but those that follow texts; the model's stop ids end outputs."""
        letters, stops = self.tokenization.vocabulary.letters, self.description.stops
        ids = range(len(letters)) if self.clocks.kept is None else self.clocks.kept.tolist()
        written = [letters[token] for token in ids]
        if self.text_columns is not None:
            written[self.text_columns.first :] = [NOTHING] * (len(ids) - self.text_columns.first)
        return GrammarCompiler(written, [at for at, token in enumerate(ids) if token in stops])

    def columns(self, allowed: Ids | None) -> Ids | None:
        """The columns of logits whose ids are and stay among `allowed` (None: all); None: every column."""
        if (kept := self.clocks.kept) is None or allowed is None:
            return allowed
        stay = len(kept) if self.text_columns is None else self.text_columns.first
        return np.flatnonzero(np.isin(kept[:stay], allowed))

    def statistics(self) -> ModelStatistics:
        """What the model has done so far. May be called from any thread."""
        thread = self.thread
        engine = thread.engine
        return ModelStatistics(
            steps=thread.steps,
            seconds=thread.seconds,
            batches=dict(thread.batches),
            tokens=engine.computed,
            kv_slots=engine.slots,
            kv_slots_used=engine.slots_in_use,
            requests=thread.answers,
            queued_seconds=thread.queued,
            evictions=thread.preemptions,
        )

    def close(self) -> None:
        self.thread.close()
        self.end()


def load(options: ModelOptions) -> LoadedModel:
    """Loads a model; raises ValueError with a text that says what to change."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return load_model(options)


def run_model(options: ModelOptions, side: Side, beside: MakeBeside = lambda _, __: None) -> RunningModel:
    """Loads and starts a model; takes seconds. Raises ValueError with a text that says what to change."""
    log.info("loading %s", options.name)
    loaded = load(options)
    beside(loaded.model.device, token_bytes_of(loaded.model))
    running = RunningModel.of(loaded, side, options)
    try:
        running.thread.engine.populate()
    except NumberOutOfRangeError:
        running.close()
        raise
    if running.thread.engine.device.type == "cuda":
        torch.cuda.synchronize()  # what was done so far was on the default stream
    return running


def token_bytes_of(model: PreTrainedModel) -> int:
    """About how many bytes of keys and values a token has on a device, as the configuration says."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kept * width * model.dtype.itemsize // (model.tp_size or 1))
