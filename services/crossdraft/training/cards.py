"""Judging a trained model, writing it as float16 safetensors, and its model card."""

import math
import platform
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.training.corpus import Document
from crossdraft.training.recipes import SEED, Recipe
from crossdraft.training.train import loss_of

CARD = """---
license: apache-2.0
library_name: transformers
---
# crossdraft {name}

A {size:.2f}M-parameter Llama with the `{tokenizer}` tokenizer ({vocabulary} ids), made by `make models` to
show and test crossdraft. It writes Python that looks like Python and means little.

| | |
|---|---|
| data | the sources of Python {python}'s standard library, without its tests and held-out files{distilled} |
| licence of the data | Python Software Foundation Licence Version 2 |
| licence of the weights | Apache-2.0 |
| training | {steps} steps of {tokens} tokens, seed {seed}, {seconds:.0f} s on {machine} |
| held-out bits per byte | {figure:.3f} |
| context | {context} tokens |
"""


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
        name=recipe.name,
        size=model.num_parameters() / 1e6,
        tokenizer=recipe.tokenizer,
        vocabulary=model.config.vocab_size,
        python=platform.python_version(),
        distilled=f"; {share:.0%} of the rows were written by the target (distillation)" if share else "",
        steps=recipe.steps,
        tokens=recipe.rows * recipe.window,
        seed=SEED,
        seconds=seconds,
        machine=f"{torch.get_num_threads()} thread(s) of a shared {platform.machine()} CPU, bfloat16 autocast",
        figure=figure,
        context=recipe.context,
    )
