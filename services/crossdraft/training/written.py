"""Text that the target writes: what the drafters are distilled on."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, StaticCache

from crossdraft.training.batches import TokenPool
from crossdraft.training.corpus import Document
from crossdraft.training.recipes import SEED

ROUNDS = 10
ROWS = 256  # texts written at once
PROMPT_TOKENS = (32, 64, 128)  # by turns
NEW_TOKENS = 192
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # by turns


@dataclass(frozen=True)
class WritingRound:
    """One batch of texts: a pure function of its number."""

    number: int

    @property
    def prompt_tokens(self) -> int:
        return PROMPT_TOKENS[self.number // len(TEMPERATURES) % len(PROMPT_TOKENS)]

    @property
    def temperature(self) -> float:
        return TEMPERATURES[self.number % len(TEMPERATURES)]


def write_texts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pool: TokenPool, path: Path
) -> tuple[Document, ...]:
    """Continue prompts from the training files; one JSON line a round in `path`, resumed from there."""
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as out:
        for number in track(range(done, ROUNDS), description="the target writes", total=ROUNDS - done):
            ids = _write_round(model, pool, WritingRound(number))
            out.write(json.dumps(tokenizer.batch_decode(ids.tolist())) + "\n")
            out.flush()
    end = str(tokenizer.eos_token)  # a drafter may write it in another way, so no text has it
    texts = [part for line in path.read_text().splitlines() for text in json.loads(line) for part in text.split(end)]
    return tuple(Document(f"written-{index}", text) for index, text in enumerate(texts) if text)


@torch.inference_mode()
def _write_round(model: LlamaForCausalLM, pool: TokenPool, plan: WritingRound) -> torch.Tensor:
    rng = np.random.default_rng([SEED, 1, plan.number])
    generator = torch.Generator().manual_seed(SEED + plan.number)
    starts = rng.integers(0, len(pool.ids) - plan.prompt_tokens, size=ROWS)
    rows = np.stack([pool.ids[start : start + plan.prompt_tokens] for start in starts])
    ids = torch.from_numpy(rows.astype(np.int64))
    cache = StaticCache(config=model.config, max_cache_len=plan.prompt_tokens + NEW_TOKENS)
    latest = ids
    for _ in range(NEW_TOKENS):
        position = torch.arange(ids.shape[1] - latest.shape[1], ids.shape[1])
        logits = model(latest, past_key_values=cache, position_ids=position[None], logits_to_keep=1).logits[:, -1]
        latest = _draw(logits.float(), plan.temperature, generator)
        ids = torch.cat([ids, latest], dim=1)
    return ids


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
