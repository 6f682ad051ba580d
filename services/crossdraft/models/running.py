"""A model as a service runs it: loaded, in its thread, with its letters and its noise."""

from dataclasses import dataclass

import numpy as np
import torch

from crossdraft.models.engine import BUDGET, Engine
from crossdraft.models.loading import LoadedModel, load_model
from crossdraft.models.pruning import Pruning
from crossdraft.models.worker import ModelThread
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import Description
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids


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


@dataclass(frozen=True, eq=False)
class RunningModel:
    """What all sessions of a service share."""

    thread: ModelThread
    tokenization: Tokenization
    noise: KeyedNoise  # of the vocabulary
    description: Description
    kept: Ids | None = None  # the id of each column of its logits, ascending; None: every id has one

    @staticmethod
    def of(loaded: LoadedModel, side: Side, budget: int = BUDGET) -> "RunningModel":
        """Puts a loaded model to work.

        Args:
            loaded: the model.
            side: whose vocabulary it is in a pair.
            budget: MiB for keys and values of all sessions.

        Raises:
            ValueError: the budget does not hold one session, or the engine or the text layer cannot run this model.
        """
        about = loaded.description
        vocabulary = Vocabulary.build(about.tokenizer_json, about.vocabulary_size, about.controls, about.stops, side)
        return RunningModel(
            ModelThread(Engine(loaded.model, about.context, budget)),
            Tokenization(about.tokenizer_json, vocabulary),
            KeyedNoise.of(vocabulary),
            about,
            loaded.kept,
        )

    def columns(self, allowed: Ids | None) -> Ids | None:
        """The columns of logits whose ids are among `allowed` (None: all); None: every column."""
        if self.kept is None or allowed is None:
            return allowed
        return np.flatnonzero(np.isin(self.kept, allowed))

    def ids(self, columns: Ids) -> Ids:
        """The ids that columns of logits stand for, in the same shape."""
        return columns if self.kept is None else self.kept[columns]

    def close(self) -> None:
        """Ends the thread when its jobs are done."""
        self.thread.close()


def run_model(options: ModelOptions, side: Side) -> RunningModel:
    """Loads a model and puts it to work; takes seconds. Raises ValueError with a text that says what to change."""
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    loaded = load_model(
        options.name, options.dtype, options.device, options.max_length, options.trust_remote_code, options.pruning
    )
    return RunningModel.of(loaded, side, options.budget)
