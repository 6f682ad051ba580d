"""Forwards whose shapes are those of a few buckets, on tensors that stay where they are: a CUDA device records the
kernels of one and does them again for the price of a single call (CUDA graphs)."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossdraft.engine.attention import Gathered, Group, Layout
from crossdraft.engine.batch import PLACES, TOKENS, WIDTHS, Bucket, Piece, Sections, bucket_of
from crossdraft.engine.kv_store import Store, staged

log = logging.getLogger(__name__)
MOST = 64  # recordings: each has a stall of some forwards while it is made, and memory for its kernels' arguments
CAPTURING = threading.Lock()  # CUDA allows one capture at a time in a process
Call = Callable[..., Tensor]  # of the model, with the arguments of one forward; its logits, (1, tokens, V)
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Graphs:
    """Records what a function does on a CUDA device; the result does the same again, on the same memory.

    The rules are those of `torch.cuda.graph`. The function has been run before, on a stream other than the default one,
    so that what libraries allocate once is there. Nothing that it calls waits for the device. It reads and writes
    tensors that stay; what it allocates itself is in a pool that all recordings share, as they are never done at the
    same time and leave nothing there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs the function, and records it; RuntimeError if it cannot be recorded."""
        with CAPTURING, torch.cuda.device(self._device):
            usual = torch.cuda.current_stream()
            self._stream.wait_stream(usual)
            with torch.cuda.stream(self._stream):
                run()
            usual.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may do to the device what they like meanwhile, such as another model's.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(usual)  # a capture that fails leaves its own
        return graph.replay


def again(run: Callable[[], None]) -> Callable[[], None]:
    """What stands for a recorder where there is none: the function itself."""
    return run


def recorder_for(device: torch.device) -> Recorder:
    """How forwards are recorded on a device."""
    return Graphs(device) if device.type == "cuda" else again


class StaticForwards:
    """Forwards of pieces in buckets, each recorded when it is first needed.

    Nothing is recorded ahead: there are hundreds of buckets, and a service comes to use some dozens of them, which
    depends on its load; a recording takes as long as a few forwards that are not recorded.

    Args:
        call: the model's forward.
        store: where keys and values are.
        dtype: of both.
        device: the same.
        longest: places of a session, at most.
    """

    def __init__(self, call: Call, store: Store, dtype: torch.dtype, device: torch.device, longest: int) -> None:
        self._call, self._store, self._dtype = call, store, dtype
        self._recorder: Recorder | None = recorder_for(device)
        self._recorded: dict[Bucket, Callable[[], None]] = {}
        self._numbers = torch.zeros(sum(LARGEST.sizes), dtype=torch.int64, device=device)
        self._offsets = torch.arange(max(PLACES, 2 * longest), device=device)  # a bucket's places are a power of two
        self._logits: Tensor | None = None  # (TOKENS, V): all recordings end here, so that none keeps memory of its own

    @property
    def recorded(self) -> int:
        """Recordings so far."""
        return len(self._recorded)

    def ready(self, pieces: Sequence[Piece]) -> Callable[[], Tensor] | None:
        """A forward that can be run once, before the next is made ready; None: these pieces are to go as they are.

        Its result: logits of those tokens that are asked for, float32 (rows, V), in order.
        """
        bucket = bucket_of(pieces)
        if bucket is None or not (bucket in self._recorded or self._records):
            return None
        numbers = torch.from_numpy(bucket.numbers(pieces, self._store.waste))
        self._numbers[: len(numbers)].copy_(staged(numbers, self._numbers.device), non_blocking=True)
        replay = self._recorded.get(bucket) or self._record(bucket)
        if replay is None:
            return None
        return lambda: self._replayed(replay, self._parts(bucket).kept[: sum(piece.asked for piece in pieces)])

    def _replayed(self, replay: Callable[[], None], kept: Tensor) -> Tensor:
        replay()
        assert self._logits is not None
        return self._logits.index_select(0, kept).float()  # a copy, as the next forward's come to the same place

    @property
    def _records(self) -> bool:
        return self._recorder is not None and len(self._recorded) < MOST

    def _record(self, bucket: Bucket) -> Callable[[], None] | None:
        assert self._recorder is not None
        try:
            replay = self._recorder(lambda: self._forward(bucket))
        except RuntimeError as error:  # of CUDA: this model waits for the device in its forward, or memory is short
            why = str(error).partition("\n")[0]
            log.warning("no more forwards are captured as CUDA graphs, the others go on as they are: %s", why)
            self._recorder = None
            return None
        if self._logits is not None:
            self._logits.fill_(torch.nan)  # what a recording does not do must not look as if it had been done
        self._recorded[bucket] = replay
        return replay

    def _forward(self, bucket: Bucket) -> None:
        """From the numbers to the logits; nothing here or in the model may depend on what the numbers are."""
        parts = self._parts(bucket)
        self._store.aim(parts.targets)
        logits = self._call(parts.ids[None], parts.positions[None], self._layout(bucket, parts))[0]
        if self._logits is None:  # the first time of all, before anything is captured
            self._logits = torch.empty(TOKENS, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        self._logits[: bucket.tokens].copy_(logits)

    def _parts(self, bucket: Bucket) -> Sections[Tensor]:
        return Sections(*self._numbers[: sum(bucket.sizes)].split(bucket.sizes))

    def _layout(self, bucket: Bucket, parts: Sections[Tensor]) -> Layout:
        """Where each seat's keys are, and which of them its rows see."""
        seats, width, used = bucket.seats, bucket.width, bucket.used
        offsets = self._offsets[:used]
        starts, lengths, bases = (part[:, None] for part in (parts.starts, parts.lengths, parts.bases))
        # Beyond a seat's own places there may be another session's, and those may be NaN, which no mask hides.
        places = (starts + offsets).masked_fill_(offsets >= lengths, self._store.nothing)
        behind = (offsets - bases).clamp(0, 63)[:, None]  # (seats, 1, used); before the base every node's limit counts
        lines = parts.lines.view(seats, width, 1) >> behind & 1
        seen = (offsets < parts.limits.view(seats, width, 1)) | (lines != 0)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        extents = Gathered(places.view(-1))
        return Layout((Group(0, bucket.tokens, seats, width, used, extents, mask[:, None], parts.rows, parts.cells),))


LARGEST = Bucket(TOKENS, TOKENS, WIDTHS[-1], 0)  # of which no bucket has more numbers
