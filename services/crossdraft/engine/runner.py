"""The model runner: one forward for slices of many requests, as a flat batch or in a bucket.

Forwards of one bucket are captured as a CUDA graph: all their kernels are replayed by a single call.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crossdraft.engine.attention import Gathered, Group, Layout, Layouts, Window
from crossdraft.engine.batch import (
    LARGEST,
    SLOTS,
    TOKENS,
    WHOLE,
    BatchSlice,
    Bucket,
    Marks,
    Sections,
    Windows,
    batch_of,
    bucket_of,
)
from crossdraft.engine.compatibility import embedding_weight, keeps_logits
from crossdraft.engine.device import least, sent, staged
from crossdraft.engine.kv_cache import KVCache, KVPool

log = logging.getLogger(__name__)
MOST = 64  # graphs: each stalls some forwards while it is captured, and needs memory for its kernels' arguments
# Times the slots of all sessions that lanes may read where keys and values are made of what is cached: each lane makes
# those of its session again.
EXPANDED = 4
CAPTURING = threading.Lock()  # CUDA allows one capture at a time in a process
Call = Callable[..., Tensor]  # of the model, with the arguments of one forward; its logits, (1, tokens, V)
GraphCapture = Callable[[Callable[[], None]], Callable[[], None]]


class CudaGraphCapture:
    """Captures what a function does on a CUDA device; the result replays it, on the same memory.

    The rules are those of `torch.cuda.graph`. The function is run before, on a stream other than the default one, so
    that what libraries allocate once is there. Nothing that it calls waits for the device. It reads and writes tensors
    that stay; what it allocates itself is in a pool that all graphs share, as they never run at the same time and leave
    nothing there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs the function, and captures it; RuntimeError if it cannot be captured."""
        with CAPTURING, torch.cuda.device(self._device):
            usual = torch.cuda.current_stream()
            self._stream.wait_stream(usual)
            with torch.cuda.stream(self._stream):
                run()
            usual.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: other threads, such as another model's, may use the device meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(usual)  # a capture that fails leaves its own stream set
        return graph.replay


def capture_for(device: torch.device) -> GraphCapture:
    """How forwards are captured on a device; without CUDA a replay runs the function again."""
    return CudaGraphCapture(device) if device.type == "cuda" else lambda run: run


class GraphRunner:
    """Forwards in buckets, each captured when it is first needed.

    Nothing is captured ahead: there are hundreds of buckets, of which a service uses some dozens, depending on its
    load; a capture takes as long as a few ordinary forwards.
    """

    def __init__(
        self,
        call: Call,
        cache: KVCache,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        windows: Windows = WHOLE,
        gathers: bool = False,
    ) -> None:
        self._call, self._cache, self._dtype = call, cache, dtype
        self._windows, self._gathers = windows, gathers
        self._capture: GraphCapture | None = capture_for(device)
        self._replays: dict[Bucket, Callable[[], None]] = {}
        most = sum(replace(LARGEST, windows=windows).sizes)
        self._numbers = torch.zeros(most, dtype=torch.int64, device=device)
        # A bucket's slots are a power of two, as are its lanes.
        self._offsets = torch.arange(max(SLOTS, TOKENS, 2 * longest), device=device)
        self._logits: Tensor | None = None  # (TOKENS, V): the output of all graphs, so that none keeps its own

    @property
    def captured(self) -> int:
        return len(self._replays)

    def prepare(self, slices: Sequence[BatchSlice], ids: Tensor | None = None) -> Callable[[], Tensor] | None:
        """A forward to be run once, before the next is prepared; None: these slices run as a flat batch.

        `ids` are as in `ModelRunner.run`. It returns the logits asked for, float32 (rows, V), in order.
        """
        bucket = bucket_of(slices, self._windows)
        if bucket is None or not (bucket in self._replays or self._may_capture):
            return None
        if self._gathers and bucket.lanes * bucket.used > EXPANDED * sum(max(SLOTS, one.used) for one in slices):
            return None
        paddings = [self._pool(window).padding_slot for window in self._windows]
        numbers = torch.from_numpy(bucket.numbers(slices, paddings))
        self._numbers[: len(numbers)].copy_(staged(numbers, self._numbers.device), non_blocking=True)
        if ids is not None:  # the first of all numbers
            self._numbers[: len(ids)].copy_(ids)
        replay = self._replays.get(bucket) or self._captured(bucket)
        if replay is None:
            return None
        return lambda: self._replayed(replay, self._parts(bucket).kept[: sum(one.rows for one in slices)])

    def _replayed(self, replay: Callable[[], None], kept: Tensor) -> Tensor:
        replay()
        assert self._logits is not None
        return self._logits.index_select(0, kept).float()  # a copy, as the next forward writes to the same memory

    @property
    def _may_capture(self) -> bool:
        return self._capture is not None and len(self._replays) < MOST

    def _captured(self, bucket: Bucket) -> Callable[[], None] | None:
        assert self._capture is not None
        replay, why = None, "another rank cannot capture it"
        try:
            replay = self._capture(lambda: self._forward(bucket))
        except RuntimeError as error:  # of CUDA: this model waits for the device in its forward, or memory is short
            why = str(error).partition("\n")[0]
        if not least(replay is not None, self._numbers.device, self._cache.ranks) or replay is None:
            log.warning("no more forwards are captured as CUDA graphs, the others go on without: %s", why)
            self._capture = None
            return None
        if self._logits is not None:
            self._logits.fill_(torch.nan)  # what a replay fails to compute must not look computed
        self._replays[bucket] = replay
        return replay

    def _forward(self, bucket: Bucket) -> None:
        """From the numbers to the logits; nothing here or in the model may depend on the numbers' values."""
        parts = self._parts(bucket)
        gathered = None
        if self._gathers:  # one more than all lanes have, which is nobody's
            null_slot = self._cache.pools[0].null_slot
            slots = self._slots(bucket.used, parts.marks[0].starts, parts.marks[0], null_slot)
            gathered = nn.functional.pad(slots, (0, 1), value=null_slot)
        pools = {id(self._pool(window)): marks for window, marks in zip(self._windows, parts.marks, strict=True)}
        self._cache.map_slots([pools[id(pool)].targets for pool in self._cache.pools], parts.positions, gathered)
        layouts = [self._layout(bucket, parts, number) for number in range(len(bucket.windows))]
        logits = self._call(parts.ids[None], parts.positions[None], layouts)[0]
        if self._logits is None:  # the first time of all, before anything is captured
            self._logits = torch.empty(TOKENS, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        self._logits[: bucket.tokens].copy_(logits)

    def _parts(self, bucket: Bucket) -> Sections[Tensor]:
        return Sections.of(self._numbers[: sum(bucket.sizes)].split(bucket.sizes))

    def _layout(self, bucket: Bucket, parts: Sections[Tensor], number: int) -> Layout:
        """Where each lane's keys are, and which of them its rows see, in layers that have this window."""
        lanes, width, marks = bucket.lanes, bucket.width, parts.marks[number]
        used = bucket.used_in(bucket.windows[number])
        offsets = self._offsets[:used]
        lows, limits, lines = (part.view(lanes, width, 1) for part in (marks.lows, marks.limits, marks.lines))
        behind = (offsets - marks.bases[:, None])[:, None]  # (lanes, 1, used)
        nodes = (lines >> behind.clamp(0, 63) & 1 != 0) & (behind >= 0)
        seen = (offsets >= lows) & (offsets < limits) | nodes
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        if self._gathers:
            starts, nobodys = self._offsets[:lanes] * bucket.used, lanes * bucket.used
        else:
            starts, nobodys = marks.starts, self._pool(bucket.windows[number]).null_slot
        keys = Gathered(self._slots(used, starts, marks, nobodys))
        return (Group(0, bucket.tokens, lanes, width, used, keys, mask[:, None], parts.rows, parts.cells),)

    def _pool(self, window: Window | None) -> KVPool:
        """Where the keys and values of layers with this window are."""
        return self._cache.pools[0 if window is None else -1]

    def _slots(self, used: int, starts: Tensor, marks: Marks[Tensor], nobodys: int) -> Tensor:
        """The slots of all lanes one after another, shape (lanes * used,)."""
        offsets = self._offsets[:used]
        # Beyond a lane's own slots there may be another session's, and those may be NaN, which no mask hides.
        slots = (starts + marks.skips)[:, None] + offsets
        return slots.masked_fill_(offsets >= marks.lengths[:, None], nobodys).view(-1)


class ModelRunner:
    """Runs a model over a KV cache.

    Args:
        model: with the engine's attention installed by the time of the first forward.
        cache: where keys and values are.
        layouts: where the model's attention modules find what they see.
        windows: of each attention module.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, layouts: Layouts, windows: Windows) -> None:
        self.graphs: GraphRunner | None = None  # for forwards that fit into a bucket; None: all are flat batches
        self._model, self._cache, self._layouts = model, cache, layouts
        self._device, self._dtype = embedding_weight(model).device, model.dtype  # the model's own looks at all weights
        self._heads: int = getattr(model.config.get_text_config(), "num_attention_heads", 1)
        self._keeps_logits = keeps_logits(model)
        # The first is that of what is gathered.
        self._windows: Windows = tuple(dict.fromkeys((*(WHOLE if cache.gathers else ()), *windows)))
        self._numbers = [self._windows.index(window) for window in windows]  # of each attention module's window
        # A 4-D mask is passed on as it is: the model then makes none of its own, and the layout says what is seen.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=self._device)

    def use_graphs(self, longest: int) -> None:
        """From now on forwards that fit run in buckets, for sessions of at most so many slots."""
        self.graphs = GraphRunner(
            self._call, self._cache, self._dtype, self._device, longest, self._windows, self._cache.gathers
        )

    def run(self, slices: Sequence[BatchSlice], ids: Tensor | None = None) -> dict[BatchSlice, Tensor]:
        """One forward for slices of different sessions: the logits of each, float32 (rows, V).

        `ids` (int64, on the device) take the place of the slices' own, of which each has one.
        """
        prepared = self.graphs.prepare(slices, ids) if self.graphs is not None else None
        if prepared is None:
            return self._flat(slices, ids)
        return _split(prepared(), slices)

    def _flat(self, slices: Sequence[BatchSlice], ids: Tensor | None) -> dict[BatchSlice, Tensor]:
        batch = batch_of(slices, self._heads, self._dtype, self._device, self._windows, self._cache.gathers)
        self._cache.map_slots(batch.slot_mappings, batch.positions[0], batch.gathered)
        options = {"logits_to_keep": batch.kept} if self._keeps_logits and batch.kept is not None else {}
        if ids is not None:
            places = {one: place for place, one in enumerate(slices)}
            ids = ids[sent(torch.tensor([places[one] for one in batch.slices]), self._device)][None]
        logits = self._call(batch.ids if ids is None else ids, batch.positions, batch.layouts, **options)[0]
        if batch.kept is not None and not options:
            logits = logits.index_select(0, batch.kept)
        return _split(logits.float(), batch.slices)

    def _call(self, ids: Tensor, positions: Tensor, layouts: Sequence[Layout], **options: Tensor) -> Tensor:
        """The model's logits, (1, tokens, V), where layers see what the layout of their window says."""
        self._layouts.of_layers = [layouts[number] for number in self._numbers]
        try:
            logits: Tensor = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                **options,
            ).logits
        finally:
            self._layouts.of_layers = None
        return logits


def _split(logits: Tensor, slices: Sequence[BatchSlice]) -> dict[BatchSlice, Tensor]:
    return dict(zip(slices, logits.split([one.rows for one in slices]), strict=True))
