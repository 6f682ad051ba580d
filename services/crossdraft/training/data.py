"""Training data: documents as one stream of token ids, rows drawn from it, and text that the target writes.

Rows are a function of the step number alone, so that a run resumes where it was stopped. The drafters are distilled on
continuations that the target wrote of prompts from the corpus.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, StaticCache

from crossdraft.training.corpus import SEED, Document

IGNORED = -100  # the label that the loss leaves out
ROUNDS = 10
ROWS = 256  # texts written at once
PROMPT_TOKENS = (32, 64, 128)  # by turns
NEW_TOKENS = 192
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # by turns


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


def write_texts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pool: TokenPool, path: Path
) -> tuple[Document, ...]:
    """Continue prompts from the training files; one JSON line a round in `path`, resumed from there."""
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as out:
        for number in track(range(done, ROUNDS), description="the target writes", total=ROUNDS - done):
            ids = _write_round(model, pool, number)
            out.write(json.dumps(tokenizer.batch_decode(ids.tolist())) + "\n")
            out.flush()
    end = str(tokenizer.eos_token)  # a drafter may write it in another way, so no text has it
    texts = [part for line in path.read_text().splitlines() for text in json.loads(line) for part in text.split(end)]
    return tuple(Document(f"written-{index}", text) for index, text in enumerate(texts) if text)


@torch.inference_mode()
def _write_round(model: LlamaForCausalLM, pool: TokenPool, number: int) -> torch.Tensor:
    """One batch of prompts and their continuations, a function of the round's number: int64 (ROWS, tokens)."""
    length = PROMPT_TOKENS[number // len(TEMPERATURES) % len(PROMPT_TOKENS)]
    generator = torch.Generator().manual_seed(SEED + number)
    starts = np.random.default_rng([SEED, 1, number]).integers(0, len(pool.ids) - length, size=ROWS)
    ids = torch.from_numpy(np.stack([pool.ids[start : start + length] for start in starts]).astype(np.int64))
    cache = StaticCache(config=model.config, max_cache_len=length + NEW_TOKENS)
    latest = ids
    for _ in range(NEW_TOKENS):
        position = torch.arange(ids.shape[1] - latest.shape[1], ids.shape[1])
        logits = model(latest, past_key_values=cache, position_ids=position[None], logits_to_keep=1).logits[:, -1]
        latest = _draw(logits.float(), TEMPERATURES[number % len(TEMPERATURES)], generator)
        ids = torch.cat([ids, latest], dim=1)
    return ids


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
