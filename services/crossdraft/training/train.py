"""Training one bundled model: its recipe, the loop (Muon for matrices, AdamW for the rest; checkpoints), its export."""

import math
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.training.corpus import SEED, Document
from crossdraft.training.data import IGNORED, TokenPool, document_rows, stream_rows

WARM_UP_STEPS = 40
HELD_RATE_SHARE = 0.4  # of the steps at the peak rate; then linearly down
LAST_RATE_SHARE = 0.03
LONG_ROWS_FROM = 0.9  # share of the steps after which rows are as long as the context
CHECKPOINT_EVERY = 100  # steps
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]  # `loss_of`, compiled or not
CARD = """---
license: apache-2.0
library_name: transformers
---
# crossdraft {recipe.name}

A {size:.2f}M-parameter Llama with the `{recipe.tokenizer}` tokenizer ({vocabulary} ids), made by `make models` to
show and test crossdraft. It writes Python that looks like Python and means little.

| | |
|---|---|
| data | the sources of Python {python}'s standard library, without its tests and held-out files{distilled} |
| licence of the data | Python Software Foundation Licence Version 2 |
| licence of the weights | Apache-2.0 |
| training | {recipe.steps} steps of {tokens} tokens, seed {seed}, {seconds:.0f} s on {machine} |
| held-out bits per byte | {figure:.3f} |
| context | {recipe.context} tokens |
"""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides one bundled model, apart from the corpus and the seed."""

    name: str
    tokenizer: str  # a key of tokenizers.BUILDERS
    vocabulary: int  # ids, special tokens included
    width: int  # hidden size
    inner: int  # feed-forward size
    layers: int
    heads: int
    context: int  # tokens
    window: int  # tokens in a training row, until the last tenth of the steps (then `context`)
    rows: int  # training rows of `window` tokens in a step
    steps: int
    peak_rate: float  # learning rate after warm-up
    written_share: float  # share of the rows that the target wrote (distillation)


TARGET = Recipe("target", "byte-level", 4096, 256, 768, 6, 4, 1024, 512, 16, 1100, 3e-3, 0.0)
DRAFTER_A = Recipe("drafter-a", "sentencepiece", 2048, 256, 704, 2, 4, 512, 384, 16, 700, 4e-3, 0.6)
DRAFTER_B = Recipe("drafter-b", "byte-level-small", 2048, 256, 704, 2, 4, 512, 384, 16, 700, 4e-3, 0.6)
DRAFTER_C = Recipe("drafter-c", "bytes", 257, 128, 256, 3, 4, 1024, 768, 8, 450, 4e-3, 0.6)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFTER_A, DRAFTER_B, DRAFTER_C)}


@dataclass
class Progressed:
    """What a checkpoint holds besides the weights and the optimizers."""

    step: int
    seconds: float  # spent in training steps, over all runs


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with tied embeddings and seeded random weights."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def rate_at(recipe: Recipe, step: int) -> float:
    """Learning rate: warm-up, peak, then a straight line down."""
    if step < WARM_UP_STEPS:
        return recipe.peak_rate * (step + 1) / WARM_UP_STEPS
    left = (recipe.steps - step) / (recipe.steps * (1 - HELD_RATE_SHARE))
    return recipe.peak_rate * max(LAST_RATE_SHARE, min(1.0, left))


def rows_at(recipe: Recipe, step: int, pool: TokenPool, written: TokenPool | None) -> torch.Tensor:
    """The training rows of one step: a pure function of the recipe and the step."""
    rng = np.random.default_rng([SEED, step])
    long = step >= recipe.steps * LONG_ROWS_FROM
    window = recipe.context if long else recipe.window
    rows = max(1, recipe.rows * recipe.window // window)
    from_target = round(rows * recipe.written_share) if written is not None else 0
    parts = [stream_rows(pool, rng, rows - from_target, window)]
    if written is not None and from_target:
        parts.append(document_rows(written, rng, from_target, window))
    return torch.cat(parts)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood, nats per token."""
    labels = rows[:, 1:].reshape(-1)
    logits = model(input_ids=rows[:, :-1].clamp(min=0), use_cache=False).logits
    return functional.cross_entropy(logits.reshape(len(labels), -1).float(), labels, ignore_index=IGNORED)


def _optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.peak_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(
    recipe: Recipe, model: LlamaForCausalLM, pool: TokenPool, written: TokenPool | None, folder: Path, compiled: bool
) -> Progressed:
    """Train `model` in place to the recipe's last step; resumes from `folder`'s checkpoint if there is one."""
    optimizers = _optimizers(model, recipe)
    state = _resume(folder / "checkpoint.pt", model, optimizers)
    compute: Loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    with Progress() as progress:
        task = progress.add_task(recipe.name, total=recipe.steps, completed=state.step)
        while state.step < recipe.steps:
            began = time.monotonic()
            loss = _step(
                model, optimizers, rows_at(recipe, state.step, pool, written), rate_at(recipe, state.step), compute
            )
            state.step += 1
            state.seconds += time.monotonic() - began
            if state.step % 20 == 0:
                progress.console.print(f"{recipe.name} step {state.step} loss {loss:.3f} {state.seconds:.0f} s")
            if state.step % CHECKPOINT_EVERY == 0 or state.step == recipe.steps:
                _save(folder / "checkpoint.pt", model, optimizers, state)
            progress.advance(task)
    return state


def _step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], rows: torch.Tensor, rate: float, compute: Loss
) -> float:
    """One step of all optimizers at `rate`; the loss before it, nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = compute(model, rows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def _resume(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progressed:
    if not path.exists():
        return Progressed(0, 0.0)
    stored = torch.load(path, weights_only=True)
    model.load_state_dict(stored["model"])
    for optimizer, values in zip(optimizers, stored["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return Progressed(stored["step"], stored["seconds"])


def _save(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: Progressed) -> None:
    stored = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": state.step,
        "seconds": state.seconds,
    }
    part = path.with_suffix(".part")
    torch.save(stored, part)
    part.replace(path)  # a stop in mid-write leaves the older checkpoint whole


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...]
) -> float:
    """Held-out bits per byte: windows of the model's context, each read without what came before it."""
    nats, size = 0.0, 0
    window = model.config.max_position_embeddings
    for document in documents:
        ids = torch.tensor(tokenizer(document.text).input_ids)
        for piece in ids.split(window):
            if len(piece) > 1:
                nats += loss_of(model, piece[None]).item() * (len(piece) - 1)
        size += len(document.text.encode())
    return nats / size / math.log(2)


def export(
    recipe: Recipe,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    seconds: float,
    figure: float,
) -> None:
    """Write weights, tokenizer and model card to `folder`, replacing what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    # transformers' wrapper of `to` hides its signature from mypy
    model.to(torch.float16).save_pretrained(folder)  # type: ignore[arg-type]
    model.to(torch.float32)  # type: ignore[arg-type]
    (folder / "README.md").write_text(_card(recipe, model, seconds, figure), encoding="utf-8")


def _card(recipe: Recipe, model: LlamaForCausalLM, seconds: float, figure: float) -> str:
    share = recipe.written_share
    return CARD.format(
        recipe=recipe,
        size=model.num_parameters() / 1e6,
        vocabulary=model.config.vocab_size,
        python=platform.python_version(),
        distilled=f"; {share:.0%} of the rows were written by the target (distillation)" if share else "",
        tokens=recipe.rows * recipe.window,
        seed=SEED,
        seconds=seconds,
        machine=f"{torch.get_num_threads()} thread(s) of a shared {platform.machine()} CPU, bfloat16 autocast",
        figure=figure,
    )
