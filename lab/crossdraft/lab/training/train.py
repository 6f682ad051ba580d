"""Training one bundled model: its recipe, the loop (Muon for matrices, AdamW for the rest; checkpoints), its export."""

import math
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.data import IGNORED, SEED, Rows, TokenPool, document_rows, stream_rows

WARM_UP_STEPS = 40
HELD_RATE_SHARE = 0.4  # of the steps at the peak rate; then linearly down
LAST_RATE_SHARE = 0.03
LONG_ROWS_FROM = 0.9  # share of the steps after which rows are as long as the context
CHECKPOINT_EVERY = 200  # steps; each is a point of the learning curve
Measure = Callable[[], tuple[float, float]]  # held-out bits per byte, agreement
CARD = """---
license: apache-2.0
library_name: transformers
---
# crossdraft {recipe.name}

A {size:.2f}M-parameter Llama with the `{recipe.tokenizer}` tokenizer ({vocabulary} ids), made by `make models` to
show and test crossdraft. {does}

| | |
|---|---|
| data | the sources of Python {python}'s standard library, without its tests and held-out files{more} |
| licence of the data | Python Software Foundation Licence Version 2{licence} |
| licence of the weights | Apache-2.0 |
| training | {earlier}{trained}, {state.seconds:.0f} s on {machine} |
| {unit} | {figure:.3f} |
| context | {recipe.context} tokens |

| step | {unit} | {agreement} |
|---|---|---|
{curve}
"""
WRITES = "It writes Python that looks like Python and means little."
CHATS = """It calls tools in the form of Hermes, says what came of it, and writes JSON, as far as it is asked
as in the templates that it learned from (`lab/crossdraft/lab/training/chats.json`). Tokenizer and shape are those of
`bundled:target`, so that the same drafters serve it."""
AGREEMENT = "agreement with what the target writes greedily after held-out prompts"
RIGHT = "held-out chats whose greedy answers are all right, to the letter"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides one bundled model, apart from the corpus and the seed."""

    name: str
    tokenizer: str  # its kind
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
    begins_with: str = ""  # the bundled model whose tokenizer and weights it begins with; empty: random ones


TARGET = Recipe("target", "byte-level", 4096, 256, 768, 6, 4, 1024, 512, 16, 1100, 3e-3, 0.0)
DRAFTER_A = Recipe("drafter-a", "sentencepiece", 2048, 256, 704, 2, 4, 512, 512, 16, 3600, 2e-3, 0.9, "drafter-a")
DRAFTER_B = Recipe("drafter-b", "byte-level-small", 2048, 256, 704, 2, 4, 512, 512, 16, 4500, 2e-3, 0.9, "drafter-b")
DRAFTER_C = Recipe("drafter-c", "bytes", 257, 128, 256, 3, 4, 1024, 768, 8, 450, 4e-3, 0.6)
CHAT = Recipe("chat", "byte-level", 4096, 256, 768, 6, 4, 1024, 0, 16, 1000, 2e-3, 0.0, "target")
RECIPES = {recipe.name: recipe for recipe in (TARGET, CHAT, DRAFTER_A, DRAFTER_B, DRAFTER_C)}


@dataclass
class Progressed:
    """What a checkpoint holds besides the weights and the optimizers."""

    step: int
    seconds: float  # spent in training steps, over all runs
    tokens: int  # in the rows so far, padding included
    curve: list[tuple[int, float, float]]  # step, held-out bits per byte, agreement


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with tied embeddings, and seeded random weights or the bundled ones."""
    if recipe.begins_with:
        return LlamaForCausalLM.from_pretrained(BUNDLED / recipe.begins_with, dtype=torch.float32)
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


def rows_at(recipe: Recipe, step: int, pool: TokenPool, written: TokenPool | None) -> Rows:
    """The training rows of one step and their labels: a pure function of the recipe and the step."""
    rng = np.random.default_rng([SEED, step])
    long = step >= recipe.steps * LONG_ROWS_FROM
    window = recipe.context if long else recipe.window
    rows = max(1, recipe.rows * recipe.window // window)
    if written is None:
        return stream_rows(pool, rng, rows, window)
    from_target = round(rows * recipe.written_share)
    ids, labels = document_rows(written, rng, from_target, window)
    others, _ = stream_rows(pool, rng, rows - from_target, ids.shape[1])
    return torch.cat([ids, others]), torch.cat([labels, others])


def _judged(model: LlamaForCausalLM, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the next token, wherever that has a label."""
    ids, labels = rows
    following = labels[:, 1:]
    judged = following != IGNORED
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[judged]).float(), following[judged]


Optimizers = list[torch.optim.Optimizer]


def optimizers_of(weights: Iterable[tuple[str, torch.Tensor]], decay: float) -> Optimizers:
    """Of weights by name, for the rates that each step sets."""
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, weight in weights:
        kinds[weight.ndim == 2 and "embed" not in name].append(weight)
    return [
        torch.optim.Muon(kinds[True], weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(kinds[False], betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def descend(optimizers: Optimizers, loss: torch.Tensor, rate: float) -> None:
    """One step of all optimizers."""
    loss.backward()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    nn.utils.clip_grad_norm_([weight for group in groups for weight in group["params"]], 1.0)
    for group in groups:
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def fit(
    recipe: Recipe, model: LlamaForCausalLM, rows_of: Callable[[int], Rows], measured: Measure, folder: Path
) -> Progressed:
    """Train `model` in place to the recipe's last step; resumes from `folder`'s checkpoint if there is one."""
    optimizers = optimizers_of(model.named_parameters(), 0.1)
    state = _resume(folder / "checkpoint.pt", model, optimizers)
    while state.step < recipe.steps:
        began = time.monotonic()
        rows = rows_of(state.step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(*_judged(model, rows))
        descend(optimizers, loss, rate_at(recipe, state.step))
        state.step += 1
        state.tokens += rows[0].numel()
        state.seconds += time.monotonic() - began
        if state.step % 20 == 0:
            print(
                f"{recipe.name} step {state.step} of {recipe.steps} loss {loss.item():.3f} {state.seconds:.0f} s",
                flush=True,
            )
        if state.step % CHECKPOINT_EVERY == 0 or state.step == recipe.steps:
            state.curve.append((state.step, *measured()))
            _save(folder / "checkpoint.pt", model, optimizers, state)
    return state


def _resume(path: Path, model: nn.Module, optimizers: Optimizers) -> Progressed:
    if not path.exists():
        return Progressed(0, 0.0, 0, [])
    stored = torch.load(path, weights_only=True)
    model.load_state_dict(stored["model"])
    for optimizer, values in zip(optimizers, stored["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return Progressed(**stored["state"])


def _save(path: Path, model: nn.Module, optimizers: Optimizers, state: Progressed) -> None:
    stored = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "state": asdict(state),
    }
    part = path.with_suffix(".part")
    torch.save(stored, part)
    part.replace(path)  # a stop in mid-write leaves the older checkpoint whole


@torch.inference_mode()
def judge(model: LlamaForCausalLM, pool: TokenPool) -> tuple[float, float]:
    """Nats of what follows the prompts in a pool, and the share of its tokens that are the model's first choice."""
    nats, hits, count = 0.0, 0, 0
    window = model.config.max_position_embeddings
    for first, output, last in zip(pool.starts, pool.outputs, pool.starts[1:] - 1, strict=False):
        ids = torch.from_numpy(pool.ids[first:last].astype(np.int64))
        labels = torch.where(torch.arange(len(ids)) < output - first, IGNORED, ids)
        for piece, labelled in zip(ids.split(window), labels.split(window), strict=True):
            logits, tokens = _judged(model, (piece[None], labelled[None]))
            nats += functional.cross_entropy(logits, tokens, reduction="sum").item()
            hits += int((logits.argmax(-1) == tokens).sum())
            count += len(tokens)
    return nats, hits / count


@torch.inference_mode()
def judge_rows(model: LlamaForCausalLM, rows: Rows) -> tuple[float, float]:
    """Bits per token that is labelled in rows of chats, and the share of rows all of whose labels are its choice."""
    nats, size, right = 0.0, 0, 0
    for ids, labels in zip(*rows, strict=True):
        last = int((labels != IGNORED).nonzero().max()) + 1
        logits, tokens = _judged(model, (ids[None, :last], labels[None, :last]))
        nats += functional.cross_entropy(logits, tokens, reduction="sum").item()
        right += bool((logits.argmax(-1) == tokens).all())
        size += len(tokens)
    return nats / size / math.log(2), right / len(rows[0])


def export(
    recipe: Recipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, state: Progressed
) -> None:
    """Write weights, tokenizer and model card to `folder`, replacing what was there."""
    before = BUNDLED / recipe.begins_with / "README.md"
    known = re.findall(r"\| training \| (.*) \|", before.read_text()) if recipe.begins_with else []
    known = [before.split(f"; then {_trained(state)}")[0] for before in known]  # it may have been exported already
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    # transformers' wrapper of `to` hides its signature from mypy
    model.to(torch.float16).save_pretrained(folder)  # type: ignore[arg-type]
    model.to(torch.float32)  # type: ignore[arg-type]
    (folder / "README.md").write_text(_card(recipe, model, state, known), encoding="utf-8")


def _trained(state: Progressed) -> str:
    return f"{state.step} steps, {state.tokens} tokens"


def _card(recipe: Recipe, model: LlamaForCausalLM, state: Progressed, earlier: list[str]) -> str:
    share = recipe.written_share
    more = f"; {share:.0%} of the rows were written by the target (distillation)" if share else ""
    if recipe is CHAT:
        more = ", as of `bundled:target`; then chats made by templates, with words of these sources"
    return CARD.format(
        recipe=recipe,
        state=state,
        trained=_trained(state),
        earlier="".join(f"{training}; then " for training in earlier),
        size=model.num_parameters() / 1e6,
        vocabulary=model.config.vocab_size,
        python=platform.python_version(),
        does=CHATS if recipe is CHAT else WRITES,
        more=more,
        licence="; the chats are made here" if recipe is CHAT else "",
        unit="held-out bits per token of answers" if recipe is CHAT else "held-out bits per byte",
        agreement=RIGHT if recipe is CHAT else AGREEMENT,
        machine=f"{torch.get_num_threads()} thread(s) of a shared {platform.machine()} CPU (bfloat16), seed {SEED}",
        figure=state.curve[-1][1],
        curve="\n".join(f"| {step} | {bits:.3f} | {share:.1%} |" for step, bits, share in state.curve),
    )
