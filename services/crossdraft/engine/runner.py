"""The model runner: one forward for slices of many requests, as a flat batch or from a table of numbers.

Where all that differs between two forwards of as many tokens is in numbers on the device, they are captured as a CUDA
graph: all their kernels are replayed by a single call.
"""

import itertools
import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crossdraft.engine.attention import LAYOUT, Layout
from crossdraft.engine.batch import (
    WHOLE,
    NextTokens,
    Numbers,
    StepInputs,
    Windows,
    batch_of,
    numbers_of,
    padding_of,
    pool_of,
    too_large,
)
from crossdraft.engine.compatibility import embedding_weight, keeps_logits
from crossdraft.engine.device import least, sent, staged, unused_memory
from crossdraft.engine.kv_cache import MIB, KVCache
from crossdraft.engine.requests import InputTokens
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.sampling.distributions import joined
from crossdraft.engine.sampling.paths import MAX_TREES, Paths, StandingDraws, StandingTrees, standing_draws
from crossdraft.engine.sampling.sampler import TOGETHER, TopRequest

log = logging.getLogger(__name__)
# Tokens of forwards that are captured, as far as memory allows: rounding up to these costs an eighth at most above 8.
SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64), *range(1152, 2049, 128))
DRAWING = 256  # tokens of steps that draw, one of each session: at most so many are captured
STEPS = 32  # of a draft that are made without the host
LOGITS = 8  # of the free memory the logits of the largest forward may take one part in so many
CAPTURING = threading.Lock()  # CUDA allows one capture at a time in a process
Replay = Callable[[], None]  # does again what was captured
GraphCapture = Callable[[Callable[[], None]], Replay]


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

    def __call__(self, run: Callable[[], None]) -> Replay:
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
    return CudaGraphCapture(device) if device.type == "cuda" else _run_again


def _run_again(run: Callable[[], None]) -> Callable[[], None]:
    run()  # as on CUDA: the largest forward, which is the first, makes the tensor of all logits
    return run


class DrawingMemory:
    """What steps that draw read and write, whichever size they have: of the numbers of a forward so many rows.

    They draw after the logits of a forward, (size, V), and write the next forward's tokens to its `own` numbers, (rows,
    size). A draft is replays of both by turns.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self._rows = rows
        self._tables = torch.zeros(STEPS * rows * tokens, dtype=torch.int64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)  # steps made
        self._drawn = torch.zeros(STEPS, tokens, dtype=torch.int64, device=device)
        self._possible = torch.zeros(STEPS, tokens, dtype=torch.float64, device=device)

    def draw(self, draws: StandingDraws, own: Tensor, logits: Tensor) -> None:
        """One step: what is captured."""
        size = len(logits)
        ids, possible = draws.draw(logits.float())
        self._drawn[:, :size].index_copy_(0, self._counter, ids[None])
        self._possible[:, :size].index_copy_(0, self._counter, possible[None])
        own.copy_(self._tables_of(size).index_select(0, self._counter)[0])
        StepInputs.of(own).ids.copy_(ids)
        self._counter.add_(1)

    def restart(self) -> None:
        """The next step is the first."""
        self._counter.zero_()

    def begin(self, paths: Paths, draws: StandingDraws, logits: Tensor, tables: Tensor) -> None:
        """The next steps are those of some paths, the first by the paths' rows; of the forwards that may follow, the
        numbers, int64 (forwards, rows, size)."""
        count = len(paths.requests)
        if len(tables):
            own = self._tables_of(tables.shape[2])[: len(tables)]
            own.copy_(staged(tables, logits.device), non_blocking=True)
        self.restart()
        logits[:count].copy_(paths.rows)
        draws.begin([request.options for request in paths.requests], [request.at[0] for request in paths.requests])
        paths.take(self._drawn[:, :count], self._possible[:, :count])

    def _tables_of(self, size: int) -> Tensor:
        """The numbers of the forwards after each step, (STEPS, rows, size)."""
        return self._tables[: STEPS * self._rows * size].view(STEPS, self._rows, size)


class GraphRunner:
    """Forwards of flat tokens, captured at start for some numbers of tokens, to which others are rounded up."""

    def __init__(self, runner: "ModelRunner") -> None:
        self._runner, self._windows, self._device = runner, runner.windows, runner.device
        self._padding_slots = [runner.cache.pools[pool_of(window)].padding_slot for window in runner.windows]
        self._rows = len(padding_of(0, self._padding_slots))  # of the numbers of a forward
        self._capture: GraphCapture | None = capture_for(runner.device)
        self._replays: dict[int, Replay] = {}  # by tokens, ascending
        self._drawing: dict[StandingDraws, dict[int, Replay]] = {}  # of each kind, by tokens
        self._growing: dict[tuple[StandingDraws, StandingTrees], dict[int, Replay]] = {}  # by trees
        self._memory: DrawingMemory | None = None  # of steps that draw, if any are captured
        self._numbers = torch.zeros(0, dtype=torch.int64, device=runner.device)
        self._inputs: dict[int, StepInputs] = {}  # of captured forwards, by tokens: parts of `_own`
        self._logits: Tensor | None = None  # (tokens, V): the output of all graphs, so that none keeps its own
        self._states: Tensor | None = None  # (tokens, width): likewise what their heads have read

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the captured forwards, ascending."""
        return (*self._replays,)

    def size_for(self, tokens: int) -> int:
        """With the tokens of padding; as many as given where nothing that large was captured."""
        return next((size for size in self._replays if size >= tokens), tokens)

    def run(self, slices: Sequence[InputTokens]) -> Tensor:
        """The logits asked for, float32 (rows, V), in order."""
        numbers = staged(torch.from_numpy(self._numbers_of(slices)), self._device)
        return self._run(numbers, sum(len(inputs.wanted) for inputs in slices))

    def following(self, paths: Paths, tokens: NextTokens, forwards: int) -> Iterator[None]:
        """Extends paths by up to so many forwards, each of the next token of all sessions."""
        for numbers in sent(self._tables(tokens, forwards), self._device):
            paths.extend(self._run(numbers, len(tokens.places), paths.ids))
            yield

    def drawing(self, paths: Paths, tokens: NextTokens, forwards: int) -> Iterator[None] | None:
        """As of `ModelRunner`; None: that is not captured."""
        options = {id(request.options): request.options for request in paths.requests}.values()
        draws = next((draws for draws in self._drawing if all(map(draws.serves, options))), None)
        size = self.size_for(len(tokens.places))
        special = any(request.row_width or request.allowed is not None for request in paths.requests)
        if draws is None or size not in self._drawing[draws] or forwards >= STEPS or special:
            return None
        return self._replayed(paths, draws, size, self._tables(tokens, forwards))

    def _replayed(self, paths: Paths, draws: StandingDraws, size: int, tables: Tensor) -> Iterator[None]:
        assert self._memory is not None
        assert self._logits is not None
        self._memory.begin(paths, draws, self._logits, tables)
        forward, draw = self._replays[size], self._drawing[draws][size]
        while True:
            draw()
            paths.taken += 1
            yield
            forward()

    def tree_batches(self, requests: Sequence[TopRequest]) -> Iterator[list[int]]:
        """The indices of those whose trees can grow together, by steps that are captured."""
        alike: dict[Hashable, list[int]] = {}
        for index, request in enumerate(requests):
            if kind := self._kind_of(request):
                batch = alike.setdefault((kind, request.levels), [])
                batch.append(index)
                if len(batch) == max(self._growing[kind]):
                    yield alike.pop((kind, request.levels))
        yield from alike.values()

    @torch.inference_mode()
    def growing(self, requests: Sequence[TopRequest], slices: Sequence[InputTokens]) -> Iterator[Tensor]:
        """Grows the trees of one batch, level by level: what `rows_of` reads, of all so far. Slices are of each the
        nodes that a level expands, the first ones."""
        kind, count = self._kind_of(requests[0]), len(requests)
        assert kind is not None
        assert self._logits is not None
        (draws, trees), most = kind, min(most for most in self._growing[kind] if most >= count)
        width = trees.width
        size = self.size_for(most * width)
        numbers = staged(torch.from_numpy(self._numbers_of(slices, size)), self._device)
        own = self._own(size).copy_(numbers, non_blocking=True)
        StepInputs.of(own).marks[0][0, : count * width].sub_(width)  # as each level adds so many
        rows = joined([request.logits for request in requests])
        self._logits[: count * width].unflatten(0, (count, width))[:, 0].copy_(rows)
        draws.begin([request.options for request in requests], [at for request in requests for at in request.at])
        trees.begin(requests, most)
        forward, level = self._replays[size], self._growing[kind][most]
        for number in itertools.count(1):
            level()
            yield trees.found[:number, :count]
            forward()

    def _kind_of(self, request: TopRequest) -> tuple[StandingDraws, StandingTrees] | None:
        kinds = (kind for kind in self._growing if kind[0].serves(request.options) and kind[1].serves(request))
        return next(kinds, None)

    def _tables(self, tokens: NextTokens, steps: int) -> Tensor:
        size = self.size_for(len(tokens.places))
        return torch.from_numpy(tokens.numbers(size, self._windows, self._padding_slots, steps))

    def _numbers_of(self, slices: Sequence[InputTokens], tokens: int = 0) -> Numbers:
        size = self.size_for(max(tokens, sum(inputs.count for inputs in slices)))
        return numbers_of(slices, size, self._windows, self._padding_slots)

    def _run(self, numbers: Tensor, rows: int, ids: Tensor | None = None) -> Tensor:
        size = numbers.shape[1]
        captured = size in self._replays
        if captured:
            self._own(size).copy_(numbers, non_blocking=True)
        inputs = self._inputs[size] if captured else StepInputs.of(numbers.to(self._device, non_blocking=True))
        if ids is not None:
            inputs.ids[: len(ids)].copy_(ids)
        if not captured:
            return self._runner.forward(inputs, inputs.kept[:rows]).float()
        self._replays[size]()
        assert self._logits is not None
        if self._states is not None:
            self._runner.read = self._states.index_select(0, inputs.kept[:rows])
        # A copy, as the next forward writes to the same memory.
        return self._logits.index_select(0, inputs.kept[:rows]).float()

    def fitting(self, longest: int, row: int) -> tuple[int, ...]:
        """Those of SIZES up to forwards of so many tokens, whose logits of so many bytes each take little memory."""
        room = unused_memory(self._device, 1, self._runner.cache.ranks) * MIB / LOGITS
        found = tuple(size for size in SIZES[: bisect_left(SIZES, longest) + 1] if size * row <= room)
        if not found:
            log.warning("no memory is left for CUDA graphs: set a smaller --gpu-memory-utilization or --cache-mib")
        return found

    @torch.inference_mode()
    def capture_all(self, sizes: Sequence[int]) -> None:
        """Captures forwards of so many tokens, the largest first: what it takes of memory is enough for the others."""
        if not sizes:
            return
        began, free = time.perf_counter(), unused_memory(self._device, 1)
        log.info("capturing forwards of %d sizes, up to %d tokens, as CUDA graphs", len(sizes), max(sizes))
        numbers = padding_of(max(sizes), self._padding_slots)
        self._numbers = torch.zeros(numbers.size, dtype=torch.int64, device=self._device)
        replays = {}
        for size in sorted({*sizes}, reverse=True):
            own = self._own(size)
            own.copy_(torch.from_numpy(numbers[:, :size]))
            self._inputs[size] = StepInputs.of(own)
            replay = self.capture(partial(self._to_logits, self._inputs[size]))
            if replay is not None:
                replays[size] = replay
        self._replays = dict(sorted(replays.items()))
        if self._logits is not None:
            self._logits.fill_(torch.nan)  # what a replay fails to compute must not look computed
        taken, seconds = max(0, free - unused_memory(self._device, 1)), time.perf_counter() - began
        log.info("captured %d CUDA graphs in %.1f s, %.0f MiB", len(replays), seconds, taken)

    @torch.inference_mode()
    def capture_drawing(self, clocks: Clocks, growing: Sequence[StandingTrees] = ()) -> None:
        """Captures what drafts are usually drawn by, too, and by the same levels of trees."""
        sizes, began = [size for size in self.sizes if size <= DRAWING][::-1], time.perf_counter()
        if not sizes or self._logits is None:
            return
        memory = self._memory = DrawingMemory(self._rows, sizes[0], self._device)
        self._numbers.zero_()
        known = standing_draws(clocks, self._logits.shape[1], sizes[0])
        for draws, most in known:
            self._drawing[draws] = {}
            for size in filter(most.__ge__, sizes):
                memory.restart()
                replay = self.capture(partial(memory.draw, draws, self._own(size), self._logits[:size]))
                if replay is not None:
                    self._drawing[draws][size] = replay
        for (draws, most), trees in itertools.product(known, growing if self._windows == WHOLE else ()):
            self._capture_trees(draws, trees, min(most, sizes[0], TOGETHER // self._logits.shape[1]))
        count = sum(map(len, (*self._drawing.values(), *self._growing.values())))
        log.info("captured %d steps that draw in %.1f s", count, time.perf_counter() - began)

    def _capture_trees(self, draws: StandingDraws, trees: StandingTrees, most: int) -> None:
        """Levels of trees that have so many rows at most."""
        assert self._logits is not None
        for count in [1 << bit for bit in range(min(most // trees.width, MAX_TREES).bit_length())][::-1]:
            tokens = count * trees.width
            trees.begin((), count)
            inputs = StepInputs.of(self._own(self.size_for(tokens)))
            replay = self.capture(partial(trees.grow, draws, self._logits[:tokens], inputs))
            if replay is not None:
                self._growing.setdefault((draws, trees), {})[count] = replay

    def capture(self, run: Callable[[], None]) -> Replay | None:
        """What does again what this function does, on the same tensors; None where it cannot be captured."""
        if self._capture is None:
            return None
        replay, failed = None, None
        try:
            replay = self._capture(run)
        except RuntimeError as error:
            failed = error
        # Of all ranks alike: of what is too large a smaller one may do; else this model waits for the device.
        done: float = 1 if failed is None else 0 if isinstance(failed, torch.OutOfMemoryError) else -1
        done = least(done, self._device, self._runner.cache.ranks)
        if done < 0:
            self._capture = None
        if done < 1:
            why = str(failed or "another rank cannot capture it").partition("\n")[0]
            log.warning("a forward that is not captured as a CUDA graph goes as it is: %s", why)
        return replay if done == 1 else None

    def drop(self) -> None:
        """From now on all forwards go as they are."""
        self._replays.clear()
        self._drawing.clear()
        self._growing.clear()

    def _own(self, size: int) -> Tensor:
        """Where the numbers of captured forwards of so many tokens are."""
        return self._numbers[: self._rows * size].view(self._rows, size)

    def _to_logits(self, inputs: StepInputs) -> None:
        logits = self._runner.forward(inputs)
        if self._logits is None:  # the first time of all, before anything is captured
            self._logits = torch.empty_like(logits)
            self._states = None if self._runner.read is None else torch.empty_like(self._runner.read)
        self._logits[: len(logits)].copy_(logits)
        if self._states is not None and self._runner.read is not None:
            self._states[: len(logits)].copy_(self._runner.read)


class ModelRunner:
    """Runs a model over a KV cache. By the first forward the engine's attention is installed in it; `windows` are those
    of each attention module.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, layers: Sequence[nn.Module], windows: Windows) -> None:
        self.graphs: GraphRunner | None = None  # None: all forwards are flat batches
        self._model, self.cache = model, cache
        self.device, self._dtype = embedding_weight(model).device, model.dtype  # the model's own looks at all weights
        self._heads: int = getattr(model.config.get_text_config(), "num_attention_heads", 1)
        self._keeps_logits = keeps_logits(model)
        # The first is that of what is gathered.
        self.windows: Windows = tuple(dict.fromkeys((*(WHOLE if cache.gathers else ()), *windows)))
        # Of each attention module its attributes, and the number of its window.
        self._attentions = [*zip(map(vars, layers), map(self.windows.index, windows), strict=True)]
        self._lay_out(None)
        # A 4-D mask is passed on as it is: the model then makes none of its own, and the layout says what is seen.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=self.device)
        self.read: Tensor | None = None  # by the head in the latest forward, a row for each of logits, (rows, width)
        self._slices: Sequence[InputTokens] = ()  # of the latest `run`, in order of their rows
        if (head := model.get_output_embeddings()) is not None:
            own = weakref.ref(self)  # a model that is used otherwise must not keep a cache that is not

            def note(_: object, inputs: tuple[Tensor, ...]) -> None:
                if (runner := own()) is not None:
                    runner.read = inputs[0].flatten(0, -2) if inputs else None

            head.register_forward_pre_hook(note)

    def run(self, slices: Sequence[InputTokens]) -> dict[InputTokens, Tensor]:
        """One forward for slices of different sessions: the logits of each, float32 (rows, V)."""
        if self.graphs is None or too_large(slices):
            return self._flat(slices)
        self._slices = slices
        return _split(self.graphs.run(slices), slices)

    def hidden(self) -> dict[InputTokens, Tensor]:
        """What the head has read in the latest `run`, of each slice, as `read`."""
        return {} if self.read is None else _split(self.read, self._slices)

    @torch.inference_mode()
    def drawing(self, paths: Paths, tokens: NextTokens, forwards: int) -> Iterator[None]:
        """Steps of some paths, the first by their rows, then by up to so many forwards of a token of each."""
        captured = None if self.graphs is None else self.graphs.drawing(paths, tokens, forwards)
        if captured is not None:
            yield from captured
            return
        paths.begin()
        yield
        if self.graphs is not None:
            yield from self.graphs.following(paths, tokens, forwards)
            return
        for step in range(forwards):
            slices = tokens.slices(step)
            logits = self._flat(slices, paths.ids)
            paths.extend(torch.cat([logits[inputs] for inputs in slices]))
            yield

    def forward(self, inputs: StepInputs, kept: Tensor | None = None) -> Tensor:
        """The model's logits after each token, (tokens, V), or after those kept, whatever the numbers are.

        Waits for nothing, and may be called several times in what is captured: a call sees the keys of those before.
        """
        pools = self.cache.pools
        targets = {id(pools[pool_of(at)]): own[0] for at, own in zip(self.windows, inputs.marks, strict=True)}
        self.cache.map_slots([targets[id(pool)] for pool in pools], inputs.positions)
        return self._call(inputs.ids, inputs.positions, inputs.marks, kept)

    def _flat(self, slices: Sequence[InputTokens], ids: Tensor | None = None) -> dict[InputTokens, Tensor]:
        batch = batch_of(slices, self._heads, self._dtype, self.device, self.windows, self.cache.gathers)
        self.cache.map_slots(batch.slot_mappings, batch.positions, batch.gathered)
        if ids is None:
            ids = batch.ids
        else:
            places = {inputs: place for place, inputs in enumerate(slices)}
            ids = ids[sent(torch.tensor([places[inputs] for inputs in batch.slices]), self.device)]
        self._slices = batch.slices
        return _split(self._call(ids, batch.positions, batch.layouts, batch.kept).float(), batch.slices)

    def _call(self, ids: Tensor, positions: Tensor, layouts: Sequence[Layout | Tensor], kept: Tensor | None) -> Tensor:
        """The model's logits, (rows, V), where layers see what the layout of their window says."""
        options = {"logits_to_keep": kept} if self._keeps_logits and kept is not None else {}
        self._lay_out(layouts)
        try:
            logits: Tensor = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=self._mask,
                past_key_values=self.cache,
                use_cache=True,
                **options,
            ).logits[0]
        finally:
            self._lay_out(None)
        if kept is None or options:
            return logits
        self.read = None if self.read is None else self.read.index_select(0, kept)
        return logits.index_select(0, kept)

    def _lay_out(self, layouts: Sequence[Layout | Tensor] | None) -> None:
        for attributes, number in self._attentions:
            attributes[LAYOUT] = None if layouts is None else layouts[number]


def _split(logits: Tensor, slices: Sequence[InputTokens]) -> dict[InputTokens, Tensor]:
    return dict(zip(slices, logits.split([len(inputs.wanted) for inputs in slices]), strict=True))
