"""A drafter's LM head, cut to the ids that a corpus uses most (FR-Spec, arXiv 2502.14856, section 3.2, Eq. 3-4)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from crossdraft.text.ranking import read_ranking
from crossdraft.verification.exchange import Description
from crossdraft.verification.rows import Ids


class CannotPruneError(ValueError):
    """The head of this model cannot be cut as asked; the text says what to change."""


@dataclass(frozen=True)
class Pruning:
    """Which ids a drafter keeps."""

    keep: int  # how many, 1 to V
    frequencies: Path  # what `crossdraft frequencies` wrote for the model's tokenizer

    def ids_of(self, description: Description) -> Ids:
        """The ids to keep of a model, ascending, shape (keep,): its stop ids, then the most frequent ones.

        A corpus has no stop ids, but every output ends with one.

        Raises:
            RankingError: the file cannot be used for this model, or `keep` is out of its range.
        """
        ranking = read_ranking(self.frequencies, description.tokenizer_json, description.model)
        return ranking.most_frequent(self.keep, description.vocabulary_size, description.stops)


def cut_head(model: PreTrainedModel, kept: Ids) -> None:
    """Replaces the LM head by one whose column i is that of id kept[i]; softmax is then over those only.

    Input embeddings stay whole, also where they were tied to the head.

    Raises:
        CannotPruneError: the head is not a plain linear layer, or cannot be replaced.
    """
    cut = cut_of(model.get_output_embeddings(), kept)
    model.set_output_embeddings(cut)
    if model.get_output_embeddings() is not cut:
        raise CannotPruneError("this model does not let its head be replaced: leave out --vocab-keep")


def cut_of(head: nn.Module | None, kept: Ids) -> nn.Linear:
    """A head with copies of the weights (and biases) of `kept` ids, in their order; raises CannotPruneError."""
    if type(head) is not nn.Linear:
        raise CannotPruneError(
            f"the head of this model is {'missing' if head is None else 'a ' + type(head).__name__}, and only a plain "
            "linear layer can be cut: leave out --vocab-keep"
        )
    rows = torch.as_tensor(kept, device=head.weight.device)
    cut = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta", dtype=head.weight.dtype)
    cut.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return cut
