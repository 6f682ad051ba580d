"""An engine for models that keep more than keys and values, or attend in their own way: each session by its own cache.

A recurrent state has no slots that could be masked or given up: it is what it is after its last token. So caches as the
model itself makes them are kept as they were after some texts of a session, its *states*, and a forward goes on from
the longest one that its text begins with. A draft never changes the state of the text before it. A chain takes one
forward, a tree one for each branch, and sessions run one after another.
"""

import copy
import gc
import inspect
import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from crossdraft.engine.compatibility import (
    PROBE,
    UnsupportedModelError,
    check_agreement,
    check_rotary_positions,
    plain_logits,
)
from crossdraft.engine.engine import CHUNK, Engine
from crossdraft.engine.kv_cache import MIB, MemoryShare
from crossdraft.engine.requests import ForwardRequest, common_prefix
from crossdraft.types.trees import ROOT, TokenTree

log = logging.getLogger(__name__)
Ids = tuple[int, ...]
CACHES = ("past_key_values", "cache_params", "state")  # what forwards call the cache that they take and return
STATES = 6  # of a session, at most, with the one that is being computed
MARGIN = 16  # tokens before a text's end at which there is a state: another tokenization may change the last ones
LAG = 8  # tokens that are computed again with a draft, rather than in one more forward for a state behind them
# Beside PROBE, a text that is longer than the kernel of a convolution and two forwards long; then another draft.
TEXT = tuple((place // 2 + place // 5) % 3 for place in range(40))
PROBES = (
    PROBE,
    ForwardRequest(PROBE.session, TEXT, TokenTree((2, 1, 0), (ROOT, 0, ROOT))),
    ForwardRequest(PROBE.session, (*TEXT, 2, 0), TokenTree((1, 1, 2), (ROOT, 0, 1))),
)


def engine_of(model: PreTrainedModel, max_length: int | None, budget: int | MemoryShare, **options: Any) -> Engine:
    """An engine that runs a model correctly: `Engine`, with these options of it, else `SequentialEngine`."""
    usual = model.config._attn_implementation
    try:
        return Engine(model, max_length, budget, **options)
    except UnsupportedModelError as error:
        if (model.tp_size or 1) > 1:  # the other ranks have ended
            raise UnsupportedModelError(f"{error}: leave out --tensor-parallel-size") from error
        reason = str(error)
    if model.device.type == "cuda":  # for the memory of what was refused
        gc.collect()
        torch.cuda.empty_cache()
    model.set_attn_implementation(usual)
    try:
        return SequentialEngine(model, max_length, budget, options.get("chunk", CHUNK), reason)
    except UnsupportedModelError as error:
        more = "" if str(error) == reason else f"; session by session: {error}"
        raise UnsupportedModelError(reason + more) from error


@dataclass(frozen=True, eq=False)
class State:
    """What a model has kept of a text."""

    cache: Any  # the model's own, which its forwards change
    logits: Tensor  # after the last token, float32 (V,)

    def copied(self) -> tuple[Any, int]:
        """A copy of the cache, and the bytes of both."""
        # Keys and values need none: a longer tensor takes their place.
        layers = [layer for layer in getattr(self.cache, "layers", ()) if isinstance(layer, DynamicLayer)]
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
        known: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        cache = copy.deepcopy(self.cache, known)
        return cache, sum(tensor.nbytes for tensor in known.values() if isinstance(tensor, Tensor)) + self.logits.nbytes


def plan_stretches(saved: Iterable[Ids], request: ForwardRequest, lag: int = LAG) -> list[tuple[Ids, Ids]]:
    """What to compute for a request: from which text to which.

    The first ones are saved texts, empty, or computed before. Up to `lag` tokens go into one forward with the tree.
    """
    context, size = request.context, len(request.context)
    known = {(), *(ids for ids in saved if ids[:size] == context[: len(ids)])}
    paths = [*request.tree.paths()]
    wanted = sorted({paths[row] for row in request.rows()}) or [()]
    leaves = [path for path, after in pairwise([*wanted, ()]) if not after or after[: len(path)] != path]
    forks = {path[: common_prefix(path, other)] for path, other in pairwise(leaves)}
    missing = {path for path in wanted if context + path not in known}
    found: list[tuple[Ids, Ids]] = []
    for leaf in leaves:
        text, lacking = context + leaf, [path for path in missing if leaf[: len(path)] == path]
        if not lacking:
            continue
        first = size + min(map(len, lacking))
        start = max((ids for ids in known if len(ids) < first and text[: len(ids)] == ids), key=len)
        stops = {len(text), *(size + len(fork) for fork in forks if leaf[: len(fork)] == fork)}
        if size - len(start) > lag:
            stops |= {size, size - MARGIN if size - len(start) > 2 * MARGIN else size}
        for stop in sorted(stop for stop in stops if stop > len(start)):
            found.append((start, text[:stop]))
            start = text[:stop]
            known.add(start)
        missing.difference_update(lacking)
    return found


class SequentialEngine(Engine):
    """Runs any causal language model whose forward takes and returns a cache that can be copied; raises as `Engine`."""

    follows = False

    def __init__(
        self, model: PreTrainedModel, max_length: int | None, budget: int | MemoryShare, chunk: int, unbatched: str
    ) -> None:
        self._begin(model, max_length, budget, chunk)
        self.unbatched = unbatched
        check_rotary_positions(model, self.max_length)
        names = inspect.signature(model.forward).parameters
        self._name = next((name for name in CACHES if name in names), CACHES[0])
        self._options = {"logits_to_keep"} & names.keys()
        self._sessions: dict[Hashable, dict[Ids, State]] = {}  # by text, the latest last
        self._taken: dict[Hashable, int] = {}  # bytes of each session
        self._most: float = inf  # bytes
        self._single = False  # after the first forward each takes one token only
        self.token_bytes = self.session_bytes = 0
        self._probe()
        each = -(-self._size(self.max_length) // self.max_length)  # bytes of a token, with its part of a session's
        plan = self._fit(each)
        self._most = max(each * plan.slots, self._size(plan.length))
        self._log_size(f"{self._most // MIB:.0f} MiB on {self.device} for states of {self.slots} tokens")
        self.computed = 0
        log.warning("sessions of this model run one after another, not together: %s", unbatched)

    @property
    def slots(self) -> int:
        return int(self._most * self.max_length // self._size(self.max_length))

    @property
    def slots_in_use(self) -> int:
        return sum([*self._taken.values()]) * self.max_length // self._size(self.max_length)

    def populate(self) -> None:
        """Nothing: forwards make states anew."""

    def due(self, request: ForwardRequest) -> Sequence[int]:
        return [token for start, end in self._plan_stretches(request) for token in end[len(start) :]]

    def admits(self, request: ForwardRequest) -> bool:
        others = sum(size for session, size in self._taken.items() if session != request.session)
        return others + self._size(len(request.context) + len(request.tree)) <= self._most

    @torch.inference_mode()
    def step(self, requests: Sequence[ForwardRequest]) -> list[Tensor | None]:
        """One request after another."""
        results: list[Tensor | None] = []
        begun: set[Hashable] = set()
        for request in requests:
            begins = request.session not in begun and self.admits(request)
            results.append(self._advance(request) if begins else None)
            begun.add(request.session)
        return results

    def close(self, session: Hashable) -> None:
        self._sessions.pop(session, None)
        self._taken.pop(session, None)

    def _plan_stretches(self, request: ForwardRequest) -> list[tuple[Ids, Ids]]:
        return plan_stretches(self._sessions.get(request.session, ()), request, 0 if self._single else LAG)

    def _size(self, length: int) -> int:
        """Bytes of a session of so many tokens."""
        return self.session_bytes + self.token_bytes * length

    def _advance(self, request: ForwardRequest) -> Tensor | None:
        """The logits of a request, or None: only some tokens of its text have been computed."""
        context, plan = request.context, self._plan_stretches(request)
        size = len(context)
        self._taken[request.session] = self._size(size + len(request.tree))
        states = self._sessions.setdefault(request.session, {})
        start = plan[0][0] if plan else context
        limit = inf if self._single and not start else request.tokens  # in parts each token would be one forward
        text = size - 1 - len(start)
        part = text > 0 and limit < sum(len(end) - len(begin) for begin, end in plan)
        if part:
            plan = [(start, context[: len(start) + min(text, request.tokens)])]
        rows = {ids[size:]: state.logits for ids, state in states.items() if ids[:size] == context}
        last = {begin: place for place, (begin, _) in enumerate(plan)}
        for place, (wanted_start, end) in enumerate(plan):
            start = max((ids for ids in ((), *states) if ids == wanted_start[: len(ids)]), key=len)
            first = max(len(start), min(size, len(end)) - 1)  # the first token whose logits are kept
            # A saved cache is changed where neither a refused draft goes back to it, nor a fork, nor a changed text.
            near = any(0 < len(start) - len(ids) < MARGIN and start[: len(ids)] == ids for ids in states)
            again = len(start) <= size < len(end) or last.get(start, 0) > place
            cache = states.pop(start).cache if near and not again else states[start].copied()[0] if start else None
            cache, logits = self._computed(cache, end[len(start) :], len(end) - first)
            states[end] = State(cache, logits[-1].clone())
            rows |= {end[size:stop]: row for stop, row in enumerate(logits, first + 1)}
            kept = _useful(states, context)
            forks = [ids for ids in states if last.get(ids, 0) > place and ids not in kept]
            for ids in states.keys() - {*kept, *forks[len(kept) - STATES :]}:  # of many the latest forks stay
                del states[ids]
        if part:
            return None
        paths = [*request.tree.paths()]
        wanted = [rows[paths[row]] for row in request.rows()]
        return torch.stack(wanted) if wanted else torch.zeros(0, self.vocabulary_size, device=self.device)

    def _computed(self, cache: Any, tokens: Ids, kept: int) -> tuple[Any, Tensor]:
        """The cache after some tokens, and the logits after the last `kept` of them, float32 (kept, V)."""
        rows = []
        for piece in [(token,) for token in tokens] if self._single and cache is not None else [tokens]:
            options = {name: min(kept, len(piece)) for name in self._options}
            options |= {} if cache is None else {self._name: cache}
            found = self.model(torch.tensor([piece], device=self.device), use_cache=True, **options)
            cache = getattr(found, self._name, None)
            rows.append(found.logits[0, -kept:].float())
            self.computed += len(piece)
        return cache, torch.cat(rows)[-kept:]

    def _probe(self) -> None:
        """Compares what is computed with plain forwards, and measures states; raises UnsupportedModelError."""
        usual = self.model.config._attn_implementation
        probes = [probe for probe in PROBES if len(probe.context) + len(probe.tree) <= self.max_length]
        expected = [plain_logits(self.model, probe) for probe in probes]
        self.model.set_attn_implementation(usual)
        for single in (False, True):
            self._single = single
            try:
                for probe, logits in zip(probes, expected, strict=True):
                    check_agreement(self.model, self.forward, logits, probe)
                break
            except UnsupportedModelError:
                self.close(PROBE.session)
                if single:
                    raise
        sizes = sorted((len(ids), state.copied()[1]) for ids, state in self._sessions[PROBE.session].items())
        (short, least), (long, most) = sizes[0], sizes[-1]
        each = max(0, most - least) // (long - short)
        self.token_bytes, self.session_bytes = STATES * each, STATES * max(1, least - short * each)
        self.close(PROBE.session)


def _useful(states: Iterable[Ids], context: Ids) -> list[Ids]:
    """Up to STATES - 1: of the text; of the latest draft; of MARGIN tokens before the text's end, and one between,
    for when the text is longer; of other drafts.
    """
    size = len(context)
    usable = [ids for ids in states if ids[:size] == context[: len(ids)]]
    text = sorted((ids for ids in usable if len(ids) <= size), key=len)
    drafts = [ids for ids in reversed(usable) if len(ids) > size]
    behind = [ids for ids in text[:-1] if len(ids) <= size - MARGIN]
    return [*text[-1:], *drafts[:1], *behind[-1:], *text[len(behind) : -1][:1], *drafts[1:]][: STATES - 1]
