"""Whether the engine computes what a model computes by itself, and what a served model needs of memory.

The cases are those in which a served model could go wrong: drafts, trees, committed branches, rolling back, sessions
that share a step or a prefix, and a text that is longer than three windows, where these are so short that the model's
own forward can have it. Each row of logits is compared with that forward, with eager attention and without a cache.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine.attention import Window
from crossdraft.engine.compatibility import (
    TOLERANCES,
    UnsupportedModelError,
    embedding_weight,
    layers_of,
    length_of,
    plain_call,
)
from crossdraft.engine.compilation import pack
from crossdraft.engine.engine import CHUNK, Engine, LayerPools
from crossdraft.engine.kv_cache import MIB, MemoryShare
from crossdraft.engine.kv_cache_manager import BLOCK
from crossdraft.engine.loader import stored
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sequential_engine import engine_of
from crossdraft.types.trees import tree_of

SHORT = BLOCK + 8  # tokens of a text of which a prefix can be reused
LONGEST = 1024  # tokens of the last text, at most: the model's own forward needs memory for the square of it
WINDOWS = 3  # that the last text is longer than, if LONGEST allows
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Requests of an engine, step by step; those of one step share a forward."""

    name: str
    steps: tuple[tuple[ForwardRequest, ...], ...]
    closed: tuple[str, ...] = ()  # sessions that end after it

    def texts(self) -> Iterator[Ids]:
        """The text before each row of logits, in order."""
        for step in self.steps:
            for request in step:
                yield from (request.context + path for path in request.tree.paths())


@dataclass(frozen=True)
class CaseResult:
    """How one case compares with the model's own logits."""

    name: str
    rows: int  # of logits that were compared
    difference: float  # the largest, relative to 1 + the largest logit of its row
    exact: bool  # it is within what rounding explains


@dataclass(frozen=True)
class ModelMemory:
    """What a served model needs of memory."""

    weights_mib: float
    token_bytes: int  # of one token, in layers that keep all
    session_bytes: int  # of a session in all others, however long it is
    context: int  # tokens of a session at most

    @property
    def session_mib(self) -> float:
        """Of a session as long as the context."""
        return (self.session_bytes + self.token_bytes * self.context) / MIB


@dataclass(frozen=True)
class Conformance:
    """What was found of a model."""

    architecture: str  # as its configuration names it
    windows: tuple[Window | None, ...]  # the different ones of its layers, if known; None: one sees the whole text
    memory: ModelMemory
    results: tuple[CaseResult, ...]
    unbatched: str  # why sessions run one after another, none with what another has computed; empty: they do not

    @property
    def exact(self) -> bool:
        return all(result.exact for result in self.results)


def cases_of(vocabulary: int, context: int, longest_window: int) -> list[Case]:
    """The cases for a model of so many ids and so long a context, with windows up to so many tokens."""
    text = tuple((5 * place + place // 7) % (vocabulary - 1) + 1 for place in range(LONGEST + SHORT))
    short, tree = text[:SHORT], tree_of([text[60:66], (*text[60:62], *text[80:83]), text[90:93]], 24)  # one forks again
    chain = tree_of([text[50:58]], len(tree))
    emitted = (*short, *text[60:62], *text[80:82])  # nodes that are not the first, which move
    long = text[: min(context - len(tree), max(2 * SHORT, WINDOWS * longest_window + SHORT), LONGEST)]
    ask = ForwardRequest
    return [
        Case("a prompt", ((ask("a", short),),)),
        Case("a draft", ((ask("a", short, chain),),)),
        Case("a draft tree", ((ask("a", short, tree),),)),
        Case("a committed branch", ((ask("a", emitted, tree),), (ask("a", (*emitted, *text[90:92]), chain),))),
        Case("rolled back", ((ask("a", short[:20], tree),),)),
        Case("several sessions", ((ask("a", short[:24]), ask("b", text[3:9], tree), ask("c", text[1:15], chain)),)),
        Case(
            "a reused prefix", ((ask("d", (*short, *text[9:13])),), (ask("e", (*short, *text[20:25]), tree),)), ("d",)
        ),
        Case(
            f"a text of {len(long)} tokens", ((ask("l", long),), (ask("l", long, tree),), (ask("l", long[:-9], chain),))
        ),
    ]


def conformance(model: PreTrainedModel, max_length: int | None = None) -> Conformance:
    """Compares an engine of the model with the model's own forward. The model can only be used by engines afterwards.

    Its linear layers are packed first where they can be, as those of services are. Raises UnsupportedModelError: the
    engine refuses it, and says why; ValueError: `max_length` does not fit the model's context.
    """
    context, vocabulary = length_of(model, max_length), len(embedding_weight(model))
    windows: tuple[Window | None, ...] = ()
    pools: LayerPools | None = None
    with suppress(UnsupportedModelError):
        layers = layers_of(model)
        windows, pools = layers.windows(model, context), LayerPools.of(model, layers, context, CHUNK)
    weights = sum(part.nbytes for weight in model.parameters() for _, part in stored(weight)) / MIB
    cases = cases_of(vocabulary, context, max((window.size for window in windows if window), default=0))
    expected = own_logits(model, [text for case in cases for text in case.texts()])
    pack(model)
    engine = engine_of(model, min(context, LONGEST + SHORT), MemoryShare(sessions=8), chunk=2 * SHORT - 1)
    cases = [case for case in cases if not (engine.unbatched and case.closed)]
    if engine.unbatched or pools is None:
        memory = ModelMemory(weights, engine.token_bytes, engine.session_bytes, context)
    else:  # as in an engine for the whole context
        memory = ModelMemory(weights, pools.slot_bytes, pools.window_bytes, context)
    results = tuple(_compared(engine, case, expected, TOLERANCES.get(model.dtype, 0.1)) for case in cases)
    name = model.config.get_text_config().model_type
    return Conformance(name, tuple(dict.fromkeys(windows)), memory, results, engine.unbatched)


def own_logits(model: PreTrainedModel, texts: Iterable[Ids]) -> dict[Ids, Tensor]:
    """The model's own logits after each text, float32 (V,), with eager attention and without a cache."""
    model.set_attn_implementation("eager")
    found: dict[Ids, Tensor] = {}
    wanted = set(texts)
    for text in sorted(wanted, key=len, reverse=True):
        if text not in found:
            rows = plain_call(model, text)
            prefixes = (text[:end] for end in range(1, len(text) + 1))
            found |= {prefix: rows[len(prefix) - 1].float() for prefix in prefixes if prefix in wanted}
    return found


def _compared(engine: Engine, case: Case, expected: dict[Ids, Tensor], tolerance: float) -> CaseResult:
    texts, largest, rows = case.texts(), 0.0, 0
    for step in case.steps:
        for logits in engine.forward(step):
            for row in logits:
                own = expected[next(texts)]
                apart = float((own - row).abs().max() / (1 + own.abs().max()))
                largest, rows = max(largest, apart) if apart == apart else float("inf"), rows + 1
    for session in case.closed:
        engine.close(session)
    return CaseResult(case.name, rows, largest, largest <= tolerance)


@dataclass(frozen=True)
class GreedyToken:
    """What a model would say."""

    token: int
    ahead: float  # nats from it to the second best


def greedy(model: PreTrainedModel, prompt: Ids, tokens: int) -> list[GreedyToken]:
    """So many tokens of transformers' own `generate`; none ends the text, from now on."""
    ids = torch.tensor([prompt], device=embedding_weight(model).device)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    generate: Any = model.generate  # its own annotations are those of a tensor
    found = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [scores[0].float().topk(2).values.tolist() for scores in found.logits]
    ahead = [first - second for first, second in best]
    return list(map(GreedyToken, found.sequences[0, len(prompt) :].tolist(), ahead))
