"""Whether a request is one that a model can answer. No torch."""

from itertools import pairwise

from crossdraft.models.feeds import Work


class ContextOverflowError(ValueError):
    """A context and its tree are longer than a session may be."""


def check_work(work: Work, held: tuple[int, ...], max_length: int, vocabulary_size: int) -> None:
    """Refuses what cannot be answered; of the context only what is not `held` already is looked at.

    Raises:
        ContextOverflowError: context and tree are longer than `max_length`.
        ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
    """
    nodes = len(work.tree)
    size = len(work.context) + nodes
    if size > max_length:
        raise ContextOverflowError(f"{size} tokens (tree of {nodes} included) exceed {max_length}")
    if not work.context:
        raise ValueError("the context needs at least one token (a BOS where there is no prompt)")
    fresh = (0, *work.context[len(held) if work.context[: len(held)] == held else 0 :], *work.tree.tokens)
    largest, smallest = max(fresh), min(fresh)
    if smallest < 0 or largest >= vocabulary_size:
        raise ValueError(f"ids must be 0 to {vocabulary_size - 1}, got {smallest if smallest < 0 else largest}")
    rows = work.wanted
    if rows and (rows[0] < 0 or rows[-1] > nodes or any(row >= after for row, after in pairwise(rows))):
        raise ValueError(f"wanted rows must ascend within 0 to {nodes}, got {rows}")
