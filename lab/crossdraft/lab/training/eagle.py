"""The drafter that reads the bundled target's hidden states.

It learns on texts that the target wrote, from the target's own distribution after each of their tokens. The later steps
of a draft are trained as they will be: each reads what the one before it has computed (as HASS, arXiv 2408.15766).
Prompts are trained without states, as the target sends none of them.
"""

import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.eagle.engine import StateLayer
from crossdraft.engine.loader import FUSION
from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.data import IGNORED, SEED, Rows, document_rows, tokenize, written
from crossdraft.lab.training.train import descend, optimizers_of

NAME = "drafter-eagle"
MINUTES = 14.0  # of training
TEXT_ROUNDS = 16  # of texts that the target writes
DEPTH = 4  # steps of a draft that are trained together
ROWS, WINDOW = 16, 256  # of a training step: texts, and tokens of each at most
PEAK_RATE, LAST_RATE_SHARE, WARM_UP_STEPS = 1e-2, 0.02, 10
REGRESSION = 0.1  # weight of the distance to the target's states, beside that of the distributions
ABSENT_SHARE = 0.15  # of rows: no state at all, or none up to a random token


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
    `ids`: int64 (rows, tokens). `states`: of the target, after each token, (rows, tokens, width). `known`: bool (rows,
    tokens): which of these states are there. `depth`: steps.
    """
    rows, tokens = ids.shape
    positions = torch.arange(tokens).expand(rows, -1)
    source = torch.where(known[..., None], states, layer.absent)
    first = layer.absent.expand(rows, 1, -1)
    earlier: list[tuple[Tensor, Tensor]] = []  # keys and values of each step

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        earlier.append((keys, values))
        step, scale = len(earlier) - 1, queries.shape[-1] ** -0.5
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, earlier[0][0]) * scale
        seen = [scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(-step), -torch.inf)]
        # Of step i the token so many steps before the last one of the draft.
        later = [[part.roll(step - at, 1) for part in earlier[at]] for at in range(1, step + 1)]
        seen += [(queries * own).sum(-1).transpose(1, 2)[..., None] * scale for own, _ in later]
        weights = torch.cat(seen, -1).float().softmax(-1).to(queries.dtype)
        found = torch.einsum("rhqk,rkhd->rqhd", weights[..., :tokens], earlier[0][1])
        shares = weights[..., tokens:].transpose(1, 2)
        return found + sum(shares[..., at, None] * own for at, (_, own) in enumerate(later))

    found: list[Tensor] = []
    for _ in range(depth):
        found.append(layer(ids, torch.cat([first, source[:, :-1]], 1), positions, attend))
        source = found[-1]
    return found


def known_states(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Which states the target has sent, bool (rows, tokens): those from the last token of the prompt on; of some rows
    fewer."""
    tokens = labels.shape[1]
    first = (labels == IGNORED).long().cumprod(1).sum(1) - 1
    late = torch.from_numpy(rng.integers(0, tokens, len(labels)))
    first = torch.where(torch.from_numpy(rng.random(len(labels)) < ABSENT_SHARE), torch.maximum(first, late), first)
    return torch.arange(tokens) >= first[:, None]


def judged(
    layer: StateLayer, target: LlamaForCausalLM, rows: Rows, rng: np.random.Generator, depth: int
) -> list[Tensor]:
    """Where an output's token comes next the target's state, then that of the layer in each step, (places, width)."""
    ids, labels = rows
    with torch.no_grad():
        states = target.model(input_ids=ids, use_cache=False).last_hidden_state
    after = functional.pad(labels[:, 1:], (0, 1), value=IGNORED) != IGNORED
    return [computed[after] for computed in (states, *drafted(layer, ids, states, known_states(labels, rng), depth))]


def losses(layer: StateLayer, target: LlamaForCausalLM, rows: Rows, rng: np.random.Generator) -> Tensor:
    """Mean over the steps of a draft: cross-entropy to the target's distribution, and the distance of the states."""
    total = torch.zeros(())
    states, *steps = judged(layer, target, rows, rng, DEPTH)
    wanted = target.lm_head(states).float().softmax(-1)
    for step, own in enumerate(steps):
        entropy = -(wanted * layer.logits(own).log_softmax(-1)).sum(-1).mean()
        total = total + 0.9**step * (entropy + REGRESSION * functional.smooth_l1_loss(own.float(), states.float()))
    return total / DEPTH


@torch.inference_mode()
def agreement(layer: StateLayer, target: LlamaForCausalLM, rows: Rows, depth: int) -> list[float]:
    """By step of a draft, how often the layer's likeliest token is the target's."""
    states, *steps = judged(layer, target, rows, np.random.default_rng(0), depth)
    best = target.lm_head(states).argmax(-1)
    return [float((layer.logits(found).argmax(-1) == best).float().mean()) for found in steps]


def make(work: Path) -> None:
    """Make `bundled:drafter-eagle`; the target's texts are kept in `work`."""
    target = LlamaForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "target")
    folder = work / NAME
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: written(work, name, TEXT_ROUNDS) for name in ("written", "greedy")}
    pools = {name: tokenize(some, tokenizer, folder / f"{name}-{len(some)}.npz") for name, some in texts.items()}
    layer = build(target)
    model = layer.model.model
    own = ("fusion", layer.fusion), ("absent", layer.absent), ("norm", model.norm.weight)
    optimizers = optimizers_of([*model.layers.named_parameters(), *own], 0.05)
    held_out = document_rows(pools["greedy"], np.random.default_rng(1), 48, 320)
    began, step, tokens, seconds = time.thread_time(), 0, 0, 0.0
    while seconds < 60 * MINUTES:
        rng, left = np.random.default_rng([SEED, 3, step]), 1 - seconds / (60 * MINUTES)
        rows = document_rows(pools["written"], rng, ROWS, WINDOW)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = losses(layer, target, rows, rng)
        descend(optimizers, loss, PEAK_RATE * max(LAST_RATE_SHARE, min(1.0, left / 0.7, (step + 1) / WARM_UP_STEPS)))
        step, tokens, seconds = step + 1, tokens + rows[0].numel(), time.thread_time() - began
        if step % 100 == 0:
            shares = agreement(layer, target, held_out, 6)
            print(f"step {step} loss {loss.item():.3f} {seconds:.0f} s, agreement {shares}", flush=True)
    print(f"{step} steps, {tokens} tokens, agreement {agreement(layer, target, held_out, 6)}: for the card")
    export(layer, tokenizer, BUNDLED / NAME)


def export(layer: StateLayer, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights and the target's tokenizer beside the card."""
    layer.model.to(torch.float16).save_pretrained(folder)  # type: ignore[arg-type]
    parts = {"fusion": layer.fusion, "absent": layer.absent}
    save_file({name: part.detach().to(torch.float16) for name, part in parts.items()}, folder / FUSION)
    tokenizer.save_pretrained(folder)
