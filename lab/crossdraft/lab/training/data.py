"""Training data: the corpus, documents as one stream of token ids, rows drawn from it, and text that the target writes.

The corpus are the sources of Python's own standard library. A fixed share of the files, chosen by a hash of their
paths, is held out: no tokenizer and no model sees them; prompts and bits per byte come from them. Rows are a function
of the step number alone, so that a run resumes where it was stopped. The drafters are distilled on continuations that
the target wrote of prompts from the corpus.
"""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, StaticCache

from crossdraft.engine.names import BUNDLED

SEED = 20251120  # of everything that training and the choice of prompts draw
HELD_OUT_PER_CENT = 6
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "encodings", "__pycache__"})
SMALLEST_FILE = 200  # bytes
LARGEST_FILE = 400_000  # bytes; above it there are only generated tables
IGNORED = -100  # the label that the loss leaves out
ROUNDS = 44
WRITTEN = {"written": range(ROUNDS), "greedy": range(2, 3)}  # rounds of the target's texts; 2 is at temperature 0
ROWS = 256  # texts written at once
PROMPT_TOKENS = (32, 64, 128, 192)  # by turns
NEW_TOKENS = 128
LENGTH_GROUPS = 8  # of texts drawn for a step: one is trained on
TEMPERATURES = (0.0, 1.0, 0.0, 0.0, 0.6, 0.0, 1.0, 0.0)  # by turns
Rows = tuple[torch.Tensor, torch.Tensor]  # ids and labels, both int64, shape (rows, tokens)


@dataclass(frozen=True)
class Document:
    """One source file, or a text that the target wrote."""

    name: str  # of a file: its path relative to the standard library, with forward slashes
    text: str
    prompt: int = 0  # characters at the beginning that are no output of the target


@dataclass(frozen=True)
class Corpus:
    """The documents to learn from and the ones to judge by."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """Whether a file is kept out of training: a pure function of its path."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PER_CENT


@cache
def read_corpus() -> Corpus:
    """Every Python source of this interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = [document for path in sorted(root.rglob("*.py")) if (document := _read(root, path))]
    training = tuple(document for document in documents if not is_held_out(document.name))
    held_out = tuple(document for document in documents if is_held_out(document.name))
    return Corpus(training, held_out)


def _read(root: Path, path: Path) -> Document | None:
    relative = path.relative_to(root)
    if SKIPPED_FOLDERS & set(relative.parts):
        return None
    raw = path.read_bytes()
    if not SMALLEST_FILE <= len(raw) <= LARGEST_FILE:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None  # a few old sources declare another encoding
    return Document(relative.as_posix(), text.replace("\r\n", "\n"))


@dataclass(frozen=True)
class TokenPool:
    """Documents as one stream of ids."""

    ids: np.ndarray  # int32, shape (tokens,)
    starts: np.ndarray  # int64, shape (documents + 1,): where each document begins
    outputs: np.ndarray  # int64, shape (documents,): where each document's prompt ends, in the stream


def tokenize(documents: tuple[Document, ...], tokenizer: PreTrainedTokenizerFast, path: Path) -> TokenPool:
    """Tokenize once, keep the result in `path` (npz). Every document ends with the end-of-text id."""
    if not path.exists():
        encoded = [tokenizer(document.text, return_offsets_mapping=True) for document in documents]
        pieces = [np.array([*encoding.input_ids, tokenizer.eos_token_id], dtype=np.int32) for encoding in encoded]
        pairs = zip(documents, encoded, strict=True)
        prompts = [sum(end <= document.prompt for _, end in encoding.offset_mapping) for document, encoding in pairs]
        starts = np.cumsum([0, *map(len, pieces)])
        np.savez(path, ids=np.concatenate(pieces), starts=starts, outputs=starts[:-1] + prompts)
    stored = np.load(path)
    return TokenPool(stored["ids"], stored["starts"], stored["outputs"])


def stream_rows(pool: TokenPool, rng: np.random.Generator, rows: int, window: int) -> Rows:
    """Windows at random places of the stream."""
    starts = rng.integers(0, len(pool.ids) - window, size=rows)
    ids = torch.from_numpy(np.stack([pool.ids[start : start + window] for start in starts]).astype(np.int64))
    return ids, ids


def document_rows(pool: TokenPool, rng: np.random.Generator, rows: int, window: int) -> Rows:
    """Texts that the target wrote, about equally long ones.

    Of a text longer than `window` the end is taken. Labels are IGNORED in prompts, after the end of a text, and at its
    end-of-text id: the text was cut there, it did not end.
    """
    lengths = np.diff(pool.starts) - 1
    some = rng.integers(0, len(lengths), size=LENGTH_GROUPS * rows)
    group = np.array_split(some[np.argsort(lengths[some], kind="stable")], LENGTH_GROUPS)[rng.integers(LENGTH_GROUPS)]
    ids = np.zeros((rows, min(window, lengths[group].max())), dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    for row, document in enumerate(group):
        last = pool.starts[document + 1] - 1
        first = max(pool.starts[document], last - ids.shape[1])
        ids[row, : last - first] = pool.ids[first:last]
        output = max(first, pool.outputs[document])
        labels[row, output - first : last - first] = pool.ids[output:last]
    return torch.from_numpy(ids), torch.from_numpy(labels)


def written(work: Path, name: str, rounds: int = ROUNDS) -> tuple[Document, ...]:
    """Texts by the target in `work`: `written` to learn from, `greedy` after held-out prompts to judge by."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "target")
    model = LlamaForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.bfloat16)
    prompts = read_corpus().held_out if name == "greedy" else read_corpus().training
    pool = tokenize(prompts, tokenizer, work / f"{name}-prompts.npz")
    return write_texts(model, tokenizer, pool, work / f"{name}.jsonl", WRITTEN[name][:rounds])


def write_texts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pool: TokenPool, path: Path, rounds: range
) -> tuple[Document, ...]:
    """Continue prompts from the pool; one JSON line a round in `path`, resumed from there."""
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as out:
        for number in track(rounds[done:], description="the target writes"):
            prompts, outputs = map(tokenizer.batch_decode, _write_round(model, pool, number))
            out.write(json.dumps(list(zip(prompts, outputs, strict=True))) + "\n")
            out.flush()
    end = str(tokenizer.eos_token)  # a drafter may write it in another way, so no text has it
    pairs = [pair for line in path.read_text().splitlines() for pair in json.loads(line)]
    parts = [(prompt.split(end)[-1], output.split(end)[0]) for prompt, output in pairs]
    return tuple(Document("written", prompt + output, len(prompt)) for prompt, output in parts if output)


@torch.inference_mode()
def _write_round(model: LlamaForCausalLM, pool: TokenPool, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of prompts and their continuations, a function of the round's number: both int64 (ROWS, tokens)."""
    length = PROMPT_TOKENS[(number // len(TEMPERATURES) + number) % len(PROMPT_TOKENS)]
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    generator = torch.Generator().manual_seed(SEED + number)
    ids, _ = stream_rows(pool, np.random.default_rng([SEED, 1, number]), ROWS, length)
    kept = StaticCache(config=model.config, max_cache_len=length + NEW_TOKENS)
    latest = ids
    for _ in range(NEW_TOKENS):
        position = torch.arange(ids.shape[1] - latest.shape[1], ids.shape[1])
        logits = model(latest, past_key_values=kept, position_ids=position[None], logits_to_keep=1).logits[:, -1]
        latest = logits.argmax(-1, keepdim=True)
        if temperature > 0:
            latest = torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, latest], dim=1)
    return ids[:, :length], ids[:, length:]
