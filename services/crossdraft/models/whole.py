"""Whole rows of a model, without a service: for what is computed from laws instead of being sampled."""

import torch
from torch import Tensor

from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.models.loading import LoadedModel
from crossdraft.models.sampling import law
from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.rows import Ids, Row

SESSION = "whole rows"


class WholeRows:
    """Rows after any ids of one model, each computed once until `forget`. For one thread.

    Raises:
        UnsupportedModelError, ValueError: the engine cannot run this model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = Engine(loaded.model, loaded.description.context)
        self._logits: dict[tuple[int, ...], Tensor] = {}

    @property
    def forwards(self) -> int:
        """Rows that were computed since `forget`."""
        return len(self._logits)

    def forget(self) -> None:
        """Frees what was computed."""
        self._logits.clear()

    @torch.inference_mode()
    def after(self, ids: tuple[int, ...], temperature: float, allowed: Ids | None = None) -> Row:
        """The law of the token after `ids`, no truncation; ids of probability 0 are left out.

        Args:
            ids: what the model is fed, prompt included, at least one.
            temperature: 0 is a one-hot row.
            allowed: int64 (m,), the only ids that may follow, others are masked before all else; None: all.

        Raises:
            ContextOverflowError, ValueError: as `Engine.check`.
        """
        if ids not in self._logits:
            (self._logits[ids],) = self._engine.forward([Work(SESSION, ids)])
        logits = self._logits[ids]
        places = torch.arange(logits.shape[-1]) if allowed is None else torch.from_numpy(allowed)
        (probabilities,) = law(logits[:, places.to(logits.device)], SamplingOptions(temperature)).cpu()
        possible = probabilities > 0
        return Row(places[possible].numpy(), probabilities[possible].numpy())
