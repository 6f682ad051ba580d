"""The engine: logits for many sessions' token trees in one forward, over a KV cache that keeps what was committed."""

import logging
import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine.batch import BatchSlice
from crossdraft.engine.compatibility import (
    PROBE,
    UnsupportedModelError,
    check_agreement,
    check_rotary_positions,
    embedding_weight,
    install,
    lay_out,
    layers_of,
    length_of,
    plain_logits,
)
from crossdraft.engine.device import unused_memory
from crossdraft.engine.kv_cache import BUDGET, MIB, CachePlan, KVCache, MemoryShare
from crossdraft.engine.kv_cache_manager import CacheEntry, KVCacheManager
from crossdraft.engine.requests import CachedTokens, ForwardRequest, InputTokens, ScheduledRequest, plan_inputs
from crossdraft.engine.runner import ModelRunner

log = logging.getLogger(__name__)
CHUNK = 512  # tokens


class Engine:
    """A causal language model with a KV cache for many sessions. For one thread at a time.

    The model's attention is replaced by the engine's own; plain calls still work where scores have neither soft cap nor
    sinks.

    Raises:
        ValueError: the budget does not hold one session, or `max_length` does not fit the model's context.
        UnsupportedModelError: the model cannot be run correctly this way.
    """

    unbatched = ""  # why sessions run one after another and share no prefixes, where they do
    session_bytes = 0  # that a session takes beside its tokens

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int | None = None,  # tokens of a session, its tree included; None: the model's context, if it fits
        budget: int | MemoryShare = BUDGET,  # MiB for keys and values
        chunk: int = CHUNK,  # tokens of one step, unless a tree alone has more
        reuse: bool = True,  # a session may begin with a prefix that another one computed
        graphs: bool | None = None,  # forwards run in buckets, which CUDA captures as graphs; None: on CUDA
    ) -> None:
        context = length_of(model, max_length)
        self._begin(model, chunk)
        layers = layers_of(model)
        self.token_bytes = size = KVCache.slot_bytes(layers.shapes, model.dtype)
        unused = unused_memory(self.device, budget.utilization) if isinstance(budget, MemoryShare) else math.inf
        plan = CachePlan.of(size, budget, unused, context, asked=max_length is not None)
        self.max_length = plan.length
        check_rotary_positions(model, plan.length)
        expected = plain_logits(model)
        self.windows = layers.windows(model, plan.length)  # of each attention layer
        self._shares_memory = isinstance(budget, MemoryShare) and self.device.type == "cpu"
        self._cache = KVCache(layers.shapes, plan.slots, model.dtype, self.device, layers.gathers)
        mib = -(-plan.slots * size // MIB)
        self._log_size(f"KV cache of {mib} MiB on {self.device} for {self._cache.slots} tokens", context)
        self._manager = KVCacheManager(self._cache, self._cache.slots, reuse)
        self.runner = ModelRunner(model, self._cache, lay_out(model, layers), self.windows)
        install(model)
        self._check_agreement(expected)
        if graphs or (graphs is None and self.device.type == "cuda"):
            self._use_graphs(expected)
        self.computed = 0

    def _begin(self, model: PreTrainedModel, chunk: int) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        self.model = model.eval()
        self.chunk = chunk
        self.computed = 0  # tokens computed so far
        self.device: torch.device = embedding_weight(model).device
        self.vocabulary_size = len(embedding_weight(model))  # ids that have an embedding

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
        self._cache.populate(BUDGET if self._shares_memory else None)

    def check(self, request: ForwardRequest, more: int = 0) -> None:
        """Raises what `forward` would raise for this request, also after so many `more` nodes; changes nothing.

        Raises:
            ContextOverflowError: context and tree are longer than `max_length`.
            ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
        """
        request.check(self.max_length - more)
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
    def step(self, scheduled: Sequence[ScheduledRequest]) -> list[Tensor | None]:
        """One forward for requests of different sessions, each of which `check` has accepted.

        Returns:
            For each request that is complete now: its logits, float32 (rows, V), by default after the last committed
            token, then after each node. None: schedule the same request again. Nothing is computed for a request that
            `admits` would deny when its turn comes in this step, or whose session is in the step already.
        """
        results: list[Tensor | None] = [None] * len(scheduled)
        admitted = self._admitted(scheduled)
        slices = self._slices(admitted, scheduled)
        running = [part for part, _ in slices.values() if part.count]
        logits = self.runner.run(running) if running else {}
        for index, (part, plan) in slices.items():
            request, entry = scheduled[index].request, admitted[index]
            self.computed += part.count
            if part.count == len(plan.tokens):
                self._manager.record(entry, CachedTokens(request.context, request.tree), plan.move_start)
                found = logits.get(part)
                results[index] = torch.zeros(0, self.vocabulary_size, device=self.device) if found is None else found
            else:
                self._manager.record(entry, CachedTokens(request.context[: part.used]), plan.move_start)
        return results

    def forward(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Logits of all requests, in as many steps as needed, where no model thread schedules them.

        Raises:
            ContextOverflowError, ValueError: as `check`, before anything is changed; or there are too few free slots.
        """
        for request in requests:
            self.check(request)
        results: list[Tensor | None] = [None] * len(requests)
        while waiting := [index for index, logits in enumerate(results) if logits is None]:
            if not self.admits(requests[waiting[0]]):
                raise ValueError("the KV cache has too few free slots for these requests: close other sessions")
            due = [ScheduledRequest(requests[index], self.chunk) for index in waiting]
            for index, logits in zip(waiting, self.step(due), strict=True):
                results[index] = logits
        return [logits for logits in results if logits is not None]

    def close(self, session: Hashable) -> None:
        """Ends a session; others may reuse its text until its slots are needed. One without slots may be closed too."""
        self._manager.close(session)

    def _log_size(self, held: str, context: int) -> None:
        if self.max_length < context:
            log.warning(
                "%s: sessions have at most %d tokens, not the model's %d (--max-model-len sets this, --cache-mib the "
                "size)",
                held,
                self.max_length,
                context,
            )
        else:
            log.info("%s, of which a session has at most %d", held, self.max_length)

    def _check_agreement(self, expected: Sequence[Tensor]) -> None:
        check_agreement(self.model, self.forward, expected)
        self.close(PROBE.session)

    def _use_graphs(self, expected: Sequence[Tensor]) -> None:
        """Changes to forwards in buckets, unless they do not compute what flat batches do."""
        self.runner.use_graphs(self.max_length)
        try:
            for _ in ("captured", "replayed"):
                self._check_agreement(expected)
        except UnsupportedModelError as error:
            log.warning("forwards of fixed shapes are not used: %s", error)
            self.runner.graphs = None
            self.close(PROBE.session)

    def _admitted(self, scheduled: Sequence[ScheduledRequest]) -> dict[int, CacheEntry]:
        """The entries of requests that have slots, by index; of each session the first request."""
        entries: dict[Hashable, tuple[int, CacheEntry]] = {}
        for index, one in enumerate(scheduled):
            if one.request.session not in entries:
                entry = self._manager.allocate(one.request)
                if entry is not None:
                    entries[one.request.session] = index, entry
        return dict(entries.values())

    def _slices(
        self, admitted: dict[int, CacheEntry], scheduled: Sequence[ScheduledRequest]
    ) -> dict[int, tuple[BatchSlice, InputTokens]]:
        """What to compute for each admitted request, and its whole plan; moves tree nodes that were committed."""
        slices, moves = {}, dict[int, int]()  # moves: from the slot of each value to its key
        for index, entry in admitted.items():
            plan = entry.plan(scheduled[index].request)
            # A forward that fails leaves the slots in an unknown state: they count as empty until it has returned.
            entry.cached, entry.planned = CachedTokens(), None
            if plan.moves:
                start = entry.extent.start
                moves |= {start + plan.move_start + number: start + slot for number, slot in enumerate(plan.moves)}
            slices[index] = BatchSlice(entry.extent, plan.first(plan.scheduled(scheduled[index].tokens))), plan
        if moves:
            self._cache.move([*moves.values()], [*moves])
        return slices

    def _plan(self, request: ForwardRequest) -> InputTokens:
        """The tokens to compute for a request, by what is cached of its session or of a text that begins alike."""
        known = self._manager.get(request.session)
        if known is not None:
            return known.plan(request)
        found = self._manager.cached_prefix(request.context)
        return plan_inputs(CachedTokens() if found is None else CachedTokens(request.context[: found[1]]), request)
