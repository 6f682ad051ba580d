"""The engine: logits for many sessions' token trees in one forward, over a KV cache that keeps what was committed."""

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine.batch import NextTokens, Windows
from crossdraft.engine.compatibility import (
    PROBE,
    ModelLayers,
    UnsupportedModelError,
    check_agreement,
    check_rotary_positions,
    embedding_weight,
    install,
    layers_of,
    length_of,
    plain_logits,
)
from crossdraft.engine.compilation import compile_layers, use_experts_on_device
from crossdraft.engine.device import unused_memory
from crossdraft.engine.kv_cache import BUDGET, CachePlan, KVCache, LayerShape, MemoryShare, WindowedLayers
from crossdraft.engine.kv_cache_manager import CacheEntry, KVCacheManager, size_for
from crossdraft.engine.requests import (
    NO_TREE,
    NOTHING_CACHED,
    CachedTokens,
    ContextOverflowError,
    ForwardRequest,
    InputTokens,
    plan_inputs,
)
from crossdraft.engine.runner import GraphRunner, ModelRunner
from crossdraft.engine.sampling.paths import Paths
from crossdraft.engine.sampling.sampler import TopRequest
from crossdraft.types.trees import MOST_NODES, ROOT, TokenTree

log = logging.getLogger(__name__)
CHUNK = 512  # tokens


@dataclass(frozen=True, eq=False)
class LayerPools:
    """Which layers of a model share their slots: those that see the whole text, and those with a window."""

    windows: Windows  # of each attention layer
    of_layers: Sequence[int]  # of each layer, the number of its pool
    slot_bytes: int  # of a token, in layers that see the whole text
    windowed: WindowedLayers | None = None  # the others, where a session may have more tokens than these keep

    @staticmethod
    def of(model: PreTrainedModel, layers: ModelLayers, length: int, chunk: int) -> "LayerPools":
        """For sessions of so many tokens, of which so many are computed at a time."""
        try:
            windows = layers.windows(model, length)
        except UnsupportedModelError:  # a shorter session may yet be possible
            windows = ()
        largest = LayerPools(windows, (), 0).largest
        kept = size_for(largest + chunk + 1 + 2 * MOST_NODES)  # with a tree, and with the one before it
        # Each module must read the layer of the cache that has its number.
        own = [getattr(layer.module, "layer_idx", None) for layer in layers.attention] == [*range(len(layers.shapes))]
        if not largest or kept >= size_for(length) or layers.gathers or not own:
            return LayerPools(windows, [0] * len(layers.shapes), KVCache.slot_bytes(layers.shapes, model.dtype))
        parts: tuple[list[LayerShape], list[LayerShape]] = [], []
        for shape, window in zip(layers.shapes, windows, strict=True):
            parts[window is not None].append(shape)
        whole, part = (KVCache.slot_bytes(shapes, model.dtype) for shapes in parts)
        numbers = [int(window is not None and whole > 0) for window in windows]
        return LayerPools(windows, numbers, whole, WindowedLayers(part, kept))

    @property
    def window_bytes(self) -> int:
        """Of a session in layers with a window, however long it is."""
        return 0 if self.windowed is None else self.windowed.slot_bytes * self.windowed.kept

    @property
    def largest(self) -> int:
        """Tokens of the largest window; 0: there is none."""
        return max((window.size for window in self.windows if window is not None), default=0)


class Engine:
    """A causal language model with a KV cache for many sessions. For one thread at a time.

    The model's attention is replaced by the engine's own; plain calls still work where scores have neither soft cap nor
    sinks. Raises ValueError: the budget does not hold one session, or `max_length` does not fit the model's context;
    UnsupportedModelError: the model cannot be run correctly this way.
    """

    unbatched = ""  # why sessions run one after another and share no prefixes, where they do
    follows = True  # whether tokens can follow others whose ids are on the device

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int | None = None,  # tokens of a session, its tree included; None: the model's context, if it fits
        budget: int | MemoryShare = BUDGET,  # MiB for keys and values
        chunk: int = CHUNK,  # tokens of one step, unless a tree alone has more
        reuse: bool = True,  # a session may begin with a prefix that another one computed
        graphs: bool | None = None,  # forwards read numbers of tokens, as CUDA graphs need it; None: on CUDA
        graph_sizes: Sequence[int] | None = None,  # tokens of those captured at start; empty: none; None: by memory
        compiled: bool | None = None,  # layers are; None: on CUDA, where one process has all, if there are graphs
    ) -> None:
        self._begin(model, max_length, budget, chunk)
        layers = layers_of(model)
        pools = LayerPools.of(model, layers, self.max_length, chunk)
        self.token_bytes, self.session_bytes = pools.slot_bytes, pools.window_bytes
        plan = self._fit(pools.slot_bytes, pools.windowed)
        check_rotary_positions(model, plan.length)
        expected = plain_logits(model)
        # Of each attention layer. A window that no session outgrows is none, but where it has slots of its own.
        self.windows = layers.windows(model, plan.length) if pools.windowed is None else pools.windows
        self._windowed = pools.windowed is not None
        slots = [plan.slots, plan.window_slots] if plan.window_slots else [plan.slots]
        kept = (pools.largest, chunk) if self._windowed else ()
        self._cache = KVCache(
            layers.shapes, slots, model.dtype, self.device, layers.gathers, pools.of_layers, self._ranks, kept
        )
        slots_of = f"{self._cache.pools[0].slots} tokens"
        self._log_size(f"KV cache of {self._cache.mib} MiB on {self.device} for {slots_of}")
        self._manager = KVCacheManager(self._cache.pools, reuse)
        self.runner = ModelRunner(model, self._cache, [layer.module for layer in layers.attention], self.windows)
        install(model)
        if self.device.type != "cpu":
            use_experts_on_device(model)
        self._check_agreement(expected)
        self.hidden_size = 0 if self.runner.read is None else self.runner.read.shape[-1]
        usual = self.device.type == "cuda" and self._ranks == 1 and (graph_sizes is None or len(graph_sizes) > 0)
        if compiled or (compiled is None and usual):
            compile_layers(model, self.forward, self.close)
        if not layers.gathers and (graphs or (graphs is None and self.device.type == "cuda")):
            self._use_graphs(expected, graph_sizes)
        self.computed = 0

    def _begin(self, model: PreTrainedModel, max_length: int | None, budget: int | MemoryShare, chunk: int) -> None:
        self.max_length, self._named, self._budget = length_of(model, max_length), max_length is not None, budget
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        self.model, self.chunk, self._ranks = model.eval(), chunk, model.tp_size or 1
        self.computed = 0  # tokens computed so far
        self.hidden_size = 0  # numbers of a hidden state that it can hand out, or reads; 0: none
        self.hidden: dict[Hashable, Tensor] = {}  # by session, of the latest step: what the head read, (rows, width)
        self._windowed = False  # whether layers with a window have slots of their own
        self.device: torch.device = embedding_weight(model).device
        self.vocabulary_size = len(embedding_weight(model))  # ids that have an embedding

    def _fit(self, token_bytes: int, windowed: WindowedLayers | None = None) -> CachePlan:
        """What the budget holds, on its device; sessions are cut to it."""
        budget, unused = self._budget, math.inf
        if isinstance(budget, MemoryShare):
            unused = unused_memory(self.device, budget.utilization, self._ranks)
        plan = CachePlan.of(token_bytes, budget, unused, self.max_length, self._named, windowed)
        self._context, self.max_length = self.max_length, plan.length
        return plan

    @property
    def slots(self) -> int:
        return self._manager.slots

    @property
    def slots_in_use(self) -> int:
        """Slots allocated to live sessions, whether or not they are filled yet. May be read from any thread."""
        return self._manager.slots_in_use

    def populate(self) -> None:
        """Takes the memory of the KV cache now, so that no pass waits for it later. Before the first session.

        Of main memory whose size was not named only a part: where several services share a machine, each would take
        half of what the ones before have left, and most of that for nothing.
        """
        shared = isinstance(self._budget, MemoryShare) and self.device.type == "cpu"
        self._cache.populate(BUDGET if shared else None)

    def check(self, request: ForwardRequest) -> None:
        """Raises what `forward` would raise for this request; changes nothing. Raises ContextOverflowError: context and
        tree are longer than `max_length`, or the tree is too large for a window; ValueError: no committed token, an id
        outside the vocabulary, or a row that does not exist."""
        request.check(self.max_length)
        if self._windowed and not self._manager.could_ever_allocate(request):
            raise ContextOverflowError(f"a tree of {len(request.tree)} nodes does not fit beside the model's window")
        tokens = self.due(request)  # what is cached was checked before
        if tokens and (min(tokens) < 0 or max(tokens) >= self.vocabulary_size):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise ValueError(f"ids must be 0 to {self.vocabulary_size - 1}, got {wrong}")

    def remaining(self, request: ForwardRequest) -> int:
        return len(self.due(request))

    def due(self, request: ForwardRequest) -> Sequence[int]:
        """The tokens still to be computed for this request, without a prefix that another session has computed."""
        return self._plan(request).tokens

    def admits(self, request: ForwardRequest) -> bool:
        """Whether the request's session has slots for all of it, or can get them without preempting a live session."""
        return self._manager.can_allocate(request)

    @torch.inference_mode()
    def step(self, requests: Sequence[ForwardRequest]) -> list[Tensor | None]:
        """One forward for requests of different sessions, of each as many `tokens` as it says.

        Returns:
            For each request that is complete now: its logits, float32 (rows, V), by default after the last committed
            token, then after each node. None: schedule the same request again. Nothing is computed for a request that
            `admits` would deny when its turn comes in this step, or whose session is in the step already.
        """
        results: list[Tensor | None] = [None] * len(requests)
        self.hidden = {}
        admitted = self._admitted(requests)
        running = [part for _, _, part in admitted.values() if part.tokens]
        logits = self.runner.run(running) if running else {}
        hidden = self.runner.hidden() if running and any(request.hidden for request in requests) else {}
        for index, (entry, plan, part) in admitted.items():
            request, complete = requests[index], part is plan
            self.computed += len(part.tokens)
            cached = request.context if complete else request.context[: part.places[-1] + 1]
            held = CachedTokens(cached, request.tree if complete else NO_TREE)
            self._manager.record(entry, held, plan.move_start)
            if complete:
                found = logits.get(part)
                results[index] = torch.zeros(0, self.vocabulary_size, device=self.device) if found is None else found
            if complete and request.hidden and part in hidden:
                self.hidden[request.session] = hidden[part]
        return results

    def give(self, session: Hashable, context: tuple[int, ...], states: Mapping[int, bytes]) -> None:
        """A target's hidden states after so many tokens of a session's text: for engines that read them."""

    def forward(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Logits of all requests, in as many steps as needed, where no model thread schedules them. Raises
        ContextOverflowError, ValueError: as `check`, before anything is changed; or there are too few free slots."""
        for request in requests:
            self.check(request)
        results: list[Tensor | None] = [None] * len(requests)
        while waiting := [index for index, logits in enumerate(results) if logits is None]:
            if not self.admits(requests[waiting[0]]):
                raise ValueError("the KV cache has too few free slots for these requests: close other sessions")
            due = [replace(requests[index], tokens=self.chunk) for index in waiting]
            for index, logits in zip(waiting, self.step(due), strict=True):
                results[index] = logits
        return [logits for logits in results if logits is not None]

    def following(self, paths: Paths, forwards: int) -> Iterator[None]:
        """Tokens that follow requests which the latest step has completed, one of each at a time; their ids stay on the
        device.

        The first of each is drawn by its row, which ends a chain, and each other one after one of up to so many
        forwards.
        """
        entries = [entry for request in paths.forwards if (entry := self._manager.get(request.session)) is not None]
        sizes = [request.size - request.more for request in paths.forwards]
        return self.runner.drawing(paths, NextTokens(sizes, [entry.extents for entry in entries]), forwards)

    def followed(self, requests: Sequence[ForwardRequest], tokens: Sequence[Sequence[int]]) -> None:
        """The ids that have followed each, now that the host has them."""
        for request, fed in zip(requests, tokens, strict=True):
            entry = self._manager.get(request.session)
            if fed and entry is not None:  # the text stays
                entry.cached = CachedTokens(request.context, request.grown(fed), entry.cached.least)

    def growing(self, trees: Sequence[TopRequest]) -> Iterator[Tensor]:
        """As of `GraphRunner`, whose first forward was in the latest step."""
        graphs, slices, nodes = self.runner.graphs, [], range(trees[0].count)
        assert graphs is not None
        siblings = TokenTree((0,) * len(nodes), (ROOT,) * len(nodes))
        for forward in [tree.forward for tree in trees if tree.forward is not None]:
            size, entry = len(forward.context), self._manager.get(forward.session)
            places = [size + node for node in nodes]
            part = InputTokens([0] * len(nodes), [size] * len(nodes), places, nodes, size, siblings)
            slices.append(replace(part, extents=() if entry is None else entry.extents))
        return graphs.growing(trees, slices)

    def close(self, session: Hashable) -> None:
        """Ends a session; others may reuse its text until its slots are needed. One without slots may be closed too."""
        self._manager.close(session)

    def _log_size(self, held: str) -> None:
        held = f"{self.model.name_or_path or 'model'}: {held}"
        if self.max_length < self._context:
            log.warning(
                "%s: sessions have at most %d tokens, not the model's %d (--max-model-len sets this, --cache-mib the "
                "size)",
                held,
                self.max_length,
                self._context,
            )
        else:
            log.info("%s, of which a session has at most %d", held, self.max_length)

    def _check_agreement(self, expected: Sequence[Tensor]) -> None:
        try:
            check_agreement(self.model, self.forward, expected)
        finally:
            self.close(PROBE.session)

    def _use_graphs(self, expected: Sequence[Tensor], sizes: Sequence[int] | None) -> None:
        """Changes to forwards that read numbers, and captures some, unless they do not compute what flat batches do."""
        graphs = self.runner.graphs = GraphRunner(self.runner)
        if not self._agrees(expected, "attention in one kernel is not used"):
            self.runner.graphs = None
            return
        if sizes is None:
            sizes = graphs.fitting(self.chunk + MOST_NODES, self.vocabulary_size * self.model.dtype.itemsize)
        graphs.capture_all(sizes)
        if graphs.sizes and not self._agrees(expected, "CUDA graphs are not used"):
            graphs.drop()

    def _agrees(self, expected: Sequence[Tensor], otherwise: str) -> bool:
        try:
            self._check_agreement(expected)
        except UnsupportedModelError as error:
            log.warning("%s: %s", otherwise, error)
            return False
        return True

    def _admitted(self, requests: Sequence[ForwardRequest]) -> dict[int, tuple[CacheEntry, InputTokens, InputTokens]]:
        """Of requests that have slots, by index, the entry, the plan, and what of it to compute; of each session the
        first request. Moves tree nodes that were committed."""
        entries: dict[Hashable, tuple[int, CacheEntry]] = {}
        for index, request in enumerate(requests):
            if request.session not in entries and (entry := self._manager.allocate(request)) is not None:
                entries[request.session] = index, entry
        admitted = {}
        moves: list[dict[int, int]] = [{} for _ in self._cache.pools]  # of each pool, to each slot the one it is from
        for index, entry in entries.values():
            request = requests[index]
            plan, limit = self._plan(request), min(request.tokens, self.chunk) if self._windowed else request.tokens
            inputs = plan.limited(limit)
            if self._windowed and inputs.tokens:
                self._manager.make_room(entry, entry.cached, inputs, request.more)
            # A forward that fails leaves the slots in an unknown state: they count as empty until it has returned.
            entry.cached = NOTHING_CACHED
            if plan.moves:
                for extent, moved in zip(entry.extents, moves, strict=True):
                    to = extent.origin + plan.move_start
                    moved |= {to + number: extent.origin + place for number, place in enumerate(plan.moves)}
            inputs.extents = entry.extents
            admitted[index] = entry, plan, inputs
        for pool, moved in zip(self._cache.pools, moves, strict=True):
            if moved:
                pool.move([*moved.values()], [*moved])
        return admitted

    def _plan(self, request: ForwardRequest) -> InputTokens:
        """The tokens to compute for a request, by what is cached of its session or of a text that begins alike; made
        once while nothing changes."""
        known = self._manager.get(request.session)
        if known is None:
            found = self._manager.cached_prefix(request.context)
            return plan_inputs(NOTHING_CACHED if found is None else CachedTokens(request.context[: found[1]]), request)
        if request.planned is None or request.planned[0] is not known.cached:
            request.planned = known.cached, plan_inputs(known.cached, request)
        return request.planned[1]
