"""Training rows, drawn by step number alone, so that a run resumes where it was stopped."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from crossdraft.training.corpus import Document

IGNORED = -100  # the label that the loss leaves out


@dataclass(frozen=True)
class TokenPool:
    """Documents as one stream of ids."""

    ids: np.ndarray  # int32, shape (tokens,)
    starts: np.ndarray  # int64, shape (documents + 1,): where each document begins


def tokenize(documents: tuple[Document, ...], tokenizer: PreTrainedTokenizerFast, cache: Path) -> TokenPool:
    """Tokenize once, keep the result in `cache` (npz). Every document ends with the end-of-text id."""
    if not cache.exists():
        end = [tokenizer.eos_token_id]
        pieces = [np.array(tokenizer(document.text).input_ids + end, dtype=np.int32) for document in documents]
        starts = np.cumsum([0, *map(len, pieces)])
        np.savez(cache, ids=np.concatenate(pieces), starts=starts)
    stored = np.load(cache)
    return TokenPool(stored["ids"], stored["starts"])


def stream_rows(pool: TokenPool, rng: np.random.Generator, rows: int, window: int) -> torch.Tensor:
    """Windows at random places of the stream; int64, shape (rows, window)."""
    starts = rng.integers(0, len(pool.ids) - window, size=rows)
    return torch.from_numpy(np.stack([pool.ids[start : start + window] for start in starts]).astype(np.int64))


def document_rows(pool: TokenPool, rng: np.random.Generator, rows: int, window: int) -> torch.Tensor:
    """Windows inside single documents (texts that the target wrote), short ones padded with IGNORED.

    The end-of-text id that closes a written document is left out: the text was cut there, it did not end.
    """
    out = np.full((rows, window), IGNORED, dtype=np.int64)
    for row, document in enumerate(rng.integers(0, len(pool.starts) - 1, size=rows)):
        first, last = pool.starts[document], pool.starts[document + 1] - 1
        start = first + rng.integers(0, max(1, last - first - window + 1))
        piece = pool.ids[start : min(last, start + window)]
        out[row, : len(piece)] = piece
    return torch.from_numpy(out)
