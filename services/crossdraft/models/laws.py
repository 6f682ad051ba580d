"""A model's own law of the next token, by a plain forward: what outputs are compared with."""

from collections.abc import Sequence

import numpy as np
import torch

from crossdraft.models.loading import load_model
from crossdraft.verification.rows import Probabilities


class NextTokenLaws:
    """A model without cache, engine and service: nothing of what is to be checked has a part in its laws."""

    def __init__(self, name: str) -> None:
        """Loads the model in float32; raises ModelLoadError."""
        loaded = load_model(name, "float32")
        self.description = loaded.description
        self._model = loaded.model

    @torch.inference_mode()
    def after(self, ids: Sequence[int]) -> Probabilities:
        """The law of the token after these, at temperature 1: float64, shape (V,)."""
        logits = self._model(torch.tensor([list(ids)], device=self._model.device)).logits[0, -1]
        law: Probabilities = logits.double().softmax(-1).cpu().numpy().astype(np.float64)
        return law
