"""`python -m crossdraft.lab.training.eagle`: the drafter that reads the bundled target's hidden states.

It learns on texts that the target wrote, from the target's own distribution after each of their tokens. The later steps
of a draft are trained as they will be: each reads what the one before it has computed (as HASS, arXiv 2408.15766).
Prompts are trained without states, as the target sends none of them.
"""

import shutil
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.eagle.engine import StateLayer
from crossdraft.engine.loader import FUSION
from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.__main__ import written
from crossdraft.lab.training.corpus import SEED
from crossdraft.lab.training.data import IGNORED, Rows, document_rows, tokenize

NAME = "drafter-eagle"
DEPTH = 4  # steps of a draft that are trained together
ROWS, WINDOW = 16, 256  # of a training step: texts, and tokens of each at most
PEAK_RATE, LAST_RATE_SHARE, WARM_UP_STEPS = 1e-2, 0.02, 10
REGRESSION = 0.1  # weight of the distance to the target's states, beside that of the distributions
ABSENT_SHARE = 0.15  # of rows: no state at all, or none up to a random token
CARD = """---
license: apache-2.0
library_name: transformers
---
# crossdraft {name}

A drafter that reads the hidden states of `bundled:target` (EAGLE): one Llama layer, {size:.2f}M parameters besides the
embedding, which is the target's, as its tokenizer is. It is of no use without that target, and plain transformers
cannot run it: `{fusion}` has what joins a token's embedding and the state before it.

| | |
|---|---|
| data | {texts} texts that the target wrote after beginnings of the sources of Python's standard library |
| licence of the data | Python Software Foundation Licence Version 2 |
| licence of the weights | Apache-2.0 |
| training | {steps} steps, {tokens} tokens, {seconds:.0f} s on 1 thread of a shared CPU (bfloat16), seed {seed} |
| agreement with the target's greedy choice, held-out greedy texts, by step of the draft | {agreement} |
"""


def build(target: LlamaForCausalLM) -> StateLayer:
    """The layer as it begins: the target's first one, which knows what to make of embeddings."""
    config = type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 1})
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    model.model.layers[0].load_state_dict(target.model.layers[0].state_dict())
    model.model.embed_tokens.requires_grad_(False)
    width = config.hidden_size
    fusion = torch.cat([torch.eye(width), torch.randn(width, width) * width**-0.5], 1)
    return StateLayer(model, nn.Parameter(fusion), nn.Parameter(torch.zeros(width)))


def drafted(layer: StateLayer, ids: Tensor, states: Tensor, known: Tensor, depth: int) -> list[Tensor]:
    """What the layer computes after each token in each step of a draft, (rows, tokens, width).

    In step 1 each token is read with the target's state before it; in step k the token, and the k - 2 before it, with
    what the step before has computed.

    Args:
        layer: it.
        ids: int64 (rows, tokens).
        states: of the target, after each token, (rows, tokens, width).
        known: bool (rows, tokens): which of these states are there.
        depth: steps.
    """
    rows, tokens = ids.shape
    positions = torch.arange(tokens).expand(rows, -1)
    source = torch.where(known[..., None], states, layer.absent)
    first = layer.absent.expand(rows, 1, -1)
    earlier: list[tuple[Tensor, Tensor]] = []  # keys and values of each step

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        step = len(earlier)
        earlier.append((keys, values))
        scale = queries.shape[-1] ** -0.5
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, earlier[0][0]) * scale
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(-step), -torch.inf)
        own = []  # of step i the token i steps before the last one of the draft
        for number in range(1, step + 1):
            back = step - number
            own.append((queries * _later(earlier[number][0], back)).sum(-1) * scale)
        if not own:
            return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), earlier[0][1])
        weights = torch.cat([scores, torch.stack(own, -1).transpose(1, 2)], -1).float().softmax(-1).to(queries.dtype)
        found = torch.einsum("rhqk,rkhd->rqhd", weights[..., :tokens], earlier[0][1])
        for number in range(1, step + 1):
            weight = weights[..., tokens + number - 1].transpose(1, 2)[..., None]
            found = found + weight * _later(earlier[number][1], step - number)
        return found

    found: list[Tensor] = []
    for _ in range(depth):
        found.append(layer(ids, torch.cat([first, source[:, :-1]], 1), positions, attend))
        source = found[-1]
    return found


def _later(values: Tensor, back: int) -> Tensor:
    """Of each token the value so many tokens before it."""
    return values if not back else torch.cat([values[:, :back], values[:, :-back]], 1)


def known_states(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Which states the target has sent, bool (rows, tokens): those from the last token of the prompt on; of some rows
    fewer."""
    tokens = labels.shape[1]
    first = (labels == IGNORED).long().cumprod(1).sum(1) - 1
    late = torch.from_numpy(rng.integers(0, tokens, len(labels)))
    first = torch.where(torch.from_numpy(rng.random(len(labels)) < ABSENT_SHARE), torch.maximum(first, late), first)
    return torch.arange(tokens) >= first[:, None]


def losses(layer: StateLayer, target: LlamaForCausalLM, rows: Rows, rng: np.random.Generator) -> Tensor:
    """Mean over the steps of a draft: cross-entropy to the target's distribution, and the distance of the states."""
    ids, labels = rows
    with torch.no_grad():
        states = target.model(input_ids=ids, use_cache=False).last_hidden_state
    after = functional.pad(labels[:, 1:], (0, 1), value=IGNORED) != IGNORED  # an output's token comes next
    wanted = target.lm_head(states[after]).float().softmax(-1)
    total = torch.zeros(())
    for step, found in enumerate(drafted(layer, ids, states, known_states(labels, rng), DEPTH)):
        own = found[after]
        entropy = -(wanted * layer.logits(own).log_softmax(-1)).sum(-1).mean()
        distance = functional.smooth_l1_loss(own.float(), states[after].float())
        total = total + 0.9**step * (entropy + REGRESSION * distance)
    return total / DEPTH


@torch.inference_mode()
def agreement(layer: StateLayer, target: LlamaForCausalLM, rows: Rows, depth: int) -> list[float]:
    """By step of a draft, how often the layer's likeliest token is the target's."""
    ids, labels = rows
    states = target.model(input_ids=ids, use_cache=False).last_hidden_state
    after = functional.pad(labels[:, 1:], (0, 1), value=IGNORED) != IGNORED
    best = target.lm_head(states[after]).argmax(-1)
    steps = drafted(layer, ids, states, known_states(labels, np.random.default_rng(0)), depth)
    return [float((layer.logits(found[after]).argmax(-1) == best).float().mean()) for found in steps]


def rate_at(progress: float, step: int) -> float:
    """Learning rate by the share of the time that is over."""
    held = min(1.0, (1 - progress) / 0.7)
    return PEAK_RATE * max(LAST_RATE_SHARE, held) * min(1.0, (step + 1) / WARM_UP_STEPS)


def main(
    work: Annotated[Path, typer.Option(help="where the target's texts are kept")] = Path("build/models"),
    minutes: Annotated[float, typer.Option(help="of training")] = 22.0,
    rounds: Annotated[int, typer.Option(help="of 256 texts that the target writes")] = 16,
) -> None:
    """Make `bundled:drafter-eagle`."""
    torch.set_num_threads(1)
    target = LlamaForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "target")
    folder = work / NAME
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: written(work, name, rounds) for name in ("written", "greedy")}
    pools = {name: tokenize(some, tokenizer, folder / f"{name}-{len(some)}.npz") for name, some in texts.items()}
    layer = build(target)
    matrices = [one for one in layer.model.model.layers.parameters() if one.ndim == 2] + [layer.fusion]
    others = [one for one in layer.model.model.layers.parameters() if one.ndim == 1]
    others += [layer.absent, layer.model.model.norm.weight]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    judged = document_rows(pools["greedy"], np.random.default_rng(1), 48, 320)
    began, step, tokens, seconds = time.thread_time(), 0, 0, 0.0
    while seconds < 60 * minutes:
        rng = np.random.default_rng([SEED, 3, step])
        rows = document_rows(pools["written"], rng, ROWS, WINDOW)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = losses(layer, target, rows, rng)
        loss.backward()
        nn.utils.clip_grad_norm_(matrices + others, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(seconds / (60 * minutes), step)
            optimizer.step()
            optimizer.zero_grad()
        step, tokens, seconds = step + 1, tokens + rows[0].numel(), time.thread_time() - began
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
        if step % 100 == 0:
            print([f"{one:.3f}" for one in agreement(layer, target, judged, 6)], flush=True)
    text = ", ".join(f"{one:.1%}" for one in agreement(layer, target, judged, 6))
    facts = {"texts": len(texts["written"]), "steps": step, "tokens": tokens, "seconds": seconds, "agreement": text}
    export(layer, BUNDLED / NAME, facts)


def export(layer: StateLayer, folder: Path, facts: dict[str, object]) -> None:
    """Write weights, the target's tokenizer and the card."""
    shutil.rmtree(folder, ignore_errors=True)
    layer.model.to(torch.float16).save_pretrained(folder)  # type: ignore[arg-type]
    layer.model.to(torch.float32)  # type: ignore[arg-type]
    parts = {"fusion": layer.fusion, "absent": layer.absent}
    save_file({name: one.detach().to(torch.float16) for name, one in parts.items()}, folder / FUSION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, folder / name)
    size = sum(one.numel() for one in layer.model.model.layers.parameters()) + layer.fusion.numel()
    card = CARD.format(name=NAME, size=size / 1e6, fusion=FUSION, seed=SEED, **facts)
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
