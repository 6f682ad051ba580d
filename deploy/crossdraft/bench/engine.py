"""`crossdraft bench engine` and `head`: what a pass of the engine and a step of a drafter take.

`engine` compares the engine's pass with a bare forward of the same model over the same tokens. `head` splits a
drafting step into layers, LM head, distribution and draw, with the whole head and with cut ones. Both count the
processor time of one thread on a CPU, which other work on the machine hardly changes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from crossdraft.bench.harness import Advance, Benchmark, Columns, Table
from crossdraft.bench.made_up_models import random_model
from crossdraft.console.running import CommandFailed, UsageError, warnings_shown
from crossdraft.engine.compatibility import embedding_weight
from crossdraft.engine.distributions import drafting_distributions, tempered
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import CannotPruneError, cut_of, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.runner import ModelRunner
from crossdraft.engine.sampler import Clocks, RandomDraws
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from crossdraft.verification.noise import KeyedNoise

MILLISECONDS = 1000.0
GB = 1e9  # bytes


# Clocks and devices.

BANDWIDTH_TURNS = 10
MATRIX = 1 << 30  # bytes, more than any cache holds
AT_ONCE = 8  # products in a turn on another device than a CPU, since launching and waiting take time as well


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds of this thread's processor time on a CPU; elsewhere of the clock, once the device has done its work."""
    if device.type == "cpu":
        return time.thread_time
    if device.type == "cuda":

        def after_cuda() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return after_cuda
    return time.perf_counter


def described(name: str) -> str:
    """What the device of a name is, and the versions of what drives it."""
    device = torch.device(name)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        return f"{device}; {versions}"
    found = torch.cuda.get_device_properties(device)
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{found.name}, {found.total_memory >> 20} MiB; {versions}, {cuda}"


@dataclass(frozen=True)
class Floor:
    """The least time of a pass on a device that reads all weights for it."""

    weights: int  # bytes that a forward reads: all but the embedding's
    bandwidth: float  # bytes a second, of a matrix times a vector, which reads every number once

    @property
    def seconds(self) -> float:
        """Of a pass."""
        return self.weights / self.bandwidth


def floor_of(model: PreTrainedModel, size: int = MATRIX) -> Floor:
    """Measures the bandwidth with a matrix of `size` bytes; the best of some turns."""
    embedding = embedding_weight(model)
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding
    everything = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    weights = everything - (0 if tied else embedding.numel() * embedding.itemsize)
    columns = 4096
    rows = max(1, size // (columns * model.dtype.itemsize))
    matrix = torch.ones(rows, columns, dtype=model.dtype, device=embedding.device)
    vector = torch.ones(columns, dtype=model.dtype, device=embedding.device)
    clock, times = clock_of(embedding.device), list[float]()
    products = 1 if embedding.device.type == "cpu" else AT_ONCE
    for _ in range(BANDWIDTH_TURNS):
        began = clock()
        for _ in range(products):
            torch.mv(matrix, vector)
        times.append((clock() - began) / products)
    return Floor(weights, matrix.numel() * matrix.itemsize / min(times))


@dataclass(eq=False)
class Stopwatch:
    """Seconds that were counted."""

    seconds: float = 0.0


@contextmanager
def in_forwards(forwards: ModelRunner, clock: Callable[[], float]) -> Iterator[Stopwatch]:
    """Counts the seconds of the engine's forwards in the block; hooks of a model miss those captured as graphs."""
    watch, before = Stopwatch(), forwards.inside

    @contextmanager
    def counted() -> Iterator[None]:
        began = clock()
        yield
        watch.seconds += clock() - began

    forwards.inside = counted
    try:
        yield watch
    finally:
        forwards.inside = before


@contextmanager
def in_module(module: nn.Module) -> Iterator[Stopwatch]:
    """Counts the processor seconds of this thread in a module in the block."""
    watch = Stopwatch()

    def before(*_: object) -> None:
        watch.seconds -= time.thread_time()

    def after(*_: object) -> None:
        watch.seconds += time.thread_time()

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


# The engine's pass beside a bare forward.

WARM_UP = 2  # turns that do not count


@dataclass(frozen=True)
class Load:
    """The size of a pass."""

    sessions: int
    tokens: int  # of each session: one committed token and a chain of nodes


def loads_of(texts: Sequence[str]) -> tuple[Load, ...]:
    """From SESSIONSxTOKENS each; raises UsageError."""
    return tuple(map(_load, texts))


def _load(text: str) -> Load:
    try:
        sessions, tokens = map(int, text.split("x"))
    except ValueError as error:
        raise UsageError(f"--load takes SESSIONSxTOKENS such as 16x6, got {text!r}") from error
    if sessions < 1 or tokens < 1:
        raise UsageError(f"--load takes 1 or more sessions and tokens, got {text}")
    return Load(sessions, tokens)


@dataclass(frozen=True)
class PassTime:
    """Medians, in seconds of one thread on a CPU, and of the clock elsewhere."""

    load: Load
    engine: float  # `Engine.forward`
    model: float  # the part of it in the model
    bare: float  # one `model(...)` with a StaticCache for all sessions, as rows of one batch
    alone: float  # the same for a single session
    difference: float  # largest, between logits of both
    floor: Floor
    captured: int  # shapes of the engine's forwards that were captured as graphs

    @property
    def overhead(self) -> float:
        """The engine's time over that of the bare forward."""
        return self.engine / self.bare

    @property
    def beside_alone(self) -> float:
        """The engine's time over that of bare forwards of each session by itself."""
        return self.engine / (self.load.sessions * self.alone)


PASSES: Columns = {
    "sessions": lambda one: one.load.sessions,
    "tokens each": lambda one: one.load.tokens,
    "engine, ms": lambda one: f"{MILLISECONDS * one.engine:.2f}",
    "of it in the model": lambda one: f"{MILLISECONDS * one.model:.2f}",
    "bare, ms": lambda one: f"{MILLISECONDS * one.bare:.2f}",
    "engine / bare": lambda one: f"{one.overhead:.3f}",
    "engine / each alone": lambda one: f"{one.beside_alone:.3f}",
    "logits apart by": lambda one: f"{one.difference:.1g}",
}


@dataclass(frozen=True)
class EnginePasses(Benchmark[PassTime]):
    """What is measured."""

    target: str  # a model's name
    dtype: str
    device: str
    mib: int  # for keys and values
    loads: tuple[Load, ...]
    context: int  # tokens of each session before the pass
    turns: int
    enforce_eager: bool = False

    unit = "turns"

    @property
    def total(self) -> int:
        """Turns."""
        return WARM_UP + self.turns

    def measure(self, advance: Advance) -> Iterator[PassTime]:
        """A result for each load. Torch has one thread from here on."""
        torch.set_num_threads(1)
        try:
            with warnings_shown():
                mine, bare = (load_model(self.target, self.dtype, self.device).model for _ in range(2))
                floor = floor_of(bare)
                for model in (mine, bare):
                    pack(model)
                length = self.context + max(load.tokens for load in self.loads)
                engine = Engine(mine, length, self.mib, graphs=False if self.enforce_eager else None)
                yield from engine_times(engine, bare, self.loads, self.context, self.turns, floor, advance)
        except NumberOutOfRangeError as error:
            raise UsageError(str(error)) from error
        except (ModelLoadError, ValueError) as error:
            raise CommandFailed(str(error)) from error

    def report(self, results: Sequence[PassTime]) -> Iterator[Table | str]:
        """A table, and the time that reading the weights alone takes."""
        yield Table.of(results, PASSES)
        floor, captured = results[0].floor, results[0].captured
        graphs = f" Shapes of the engine's forwards that were captured as graphs: {captured}."
        yield (
            f"{self.target} in {self.dtype} on {self.device}, after texts of {self.context} tokens. A pass reads "
            f"{floor.weights / GB:.2f} GB of weights, which takes {MILLISECONDS * floor.seconds:.2f} ms at the "
            f"{floor.bandwidth / GB:.1f} GB a second that were measured.{'' if self.device == 'cpu' else graphs}"
        )


def engine_times(
    engine: Engine,
    bare: PreTrainedModel,
    loads: Sequence[Load],
    context: int,
    turns: int,
    floor: Floor,
    advance: Advance = lambda count=1, doing="": None,
) -> list[PassTime]:
    """Times of some loads, after texts of `context` tokens; engine and bare model and all loads take turns.

    Args:
        engine: of a model that it has to itself.
        bare: the same model, loaded once more.
        loads: at least one; a single session with as many tokens as each is measured besides.
        context: tokens of each session before the pass.
        turns: that count.
        floor: of the model.
        advance: is called after each turn.
    """
    alone = [Load(1, load.tokens) for load in loads]
    races = {load: Race(engine, bare, load, context) for load in dict.fromkeys((*alone, *loads))}
    for turn in range(WARM_UP + turns):
        for race in races.values():
            race.run(turn, counts=turn >= WARM_UP)
        advance()
    return [
        PassTime(
            load,
            median(races[load].engine),
            median(races[load].model),
            median(races[load].bare),
            median(races[Load(1, load.tokens)].bare),
            races[load].difference,
            floor,
            engine.captured,
        )
        for load in loads
    ]


@dataclass(eq=False)
class Race:
    """Engine and bare model over one load. Tokens differ from turn to turn, since the engine skips what it holds."""

    _engine: Engine
    _model: PreTrainedModel
    _load: Load
    _context: int
    engine: list[float] = field(default_factory=list)  # seconds of each turn that counts
    model: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    difference: float = 0.0

    def __post_init__(self) -> None:
        self._size = self._engine.vocabulary_size
        self._clock = clock_of(self._engine.device)
        self._device = embedding_weight(self._model).device
        self._cache = StaticCache(self._model.config, max_cache_len=self._context + self._load.tokens)
        with torch.inference_mode():
            self._model(self._rows([self._text(session) for session in range(self._load.sessions)]), **self._options(0))

    def run(self, turn: int, counts: bool) -> None:
        """A pass of each; the first one changes from turn to turn."""
        fed = [[(turn + session + place) % self._size for place in range(self._load.tokens)] for session in self._names]
        ways = [self._run_engine, self._run_bare]
        found = {way: way(fed, counts) for way in (ways if turn % 2 else reversed(ways))}
        apart = float((found[self._run_engine] - found[self._run_bare]).abs().max())
        self.difference = self.difference if apart <= self.difference else apart  # one that is no number stays

    @property
    def _names(self) -> range:
        return range(self._load.sessions)

    def _run_engine(self, fed: Sequence[Sequence[int]], counts: bool) -> Tensor:
        texts = [ForwardRequest(name, self._text(name), wanted=()) for name in self._names]
        self._engine.forward(texts)
        if self._engine.sessions < len(texts):
            raise NumberOutOfRangeError(
                f"the budget holds {self._engine.sessions} sessions of {self._context} tokens, and {len(texts)} are "
                "measured: raise it"
            )
        nodes = self._load.tokens - 1
        parents = tuple(range(ROOT, nodes - 1))
        works = [
            ForwardRequest(text.session, (*text.context, first), TokenTree(tuple(rest), parents))
            for text, (first, *rest) in zip(texts, fed, strict=True)
        ]
        with in_forwards(self._engine.runner, self._clock) as inside:
            began = self._clock()
            logits = self._engine.forward(works)
            taken = self._clock() - began
        if counts:
            self.engine.append(taken)
            self.model.append(inside.seconds)
        return torch.stack(logits)

    @torch.inference_mode()
    def _run_bare(self, fed: Sequence[Sequence[int]], counts: bool) -> Tensor:
        for layer in self._cache.layers:
            assert isinstance(layer, StaticLayer)
            layer.cumulative_length.fill_(self._context)
        rows, options = self._rows(fed), self._options(self._context)
        began = self._clock()
        logits: Tensor = self._model(rows, **options).logits
        taken = self._clock() - began
        self.bare += [taken] if counts else []
        return logits.float()

    def _text(self, session: int) -> tuple[int, ...]:
        return tuple((7 * session + 3 * place) % self._size for place in range(self._context))

    def _rows(self, ids: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(ids, device=self._device)

    def _options(self, start: int) -> dict[str, object]:
        length = self._context if start == 0 else self._load.tokens
        positions = torch.arange(start, start + length, device=self._device).expand(self._load.sessions, -1)
        return {"position_ids": positions, "past_key_values": self._cache, "use_cache": True}


# Where the time of a drafting step goes: `crossdraft bench head`.

RANDOM = "random:"  # before the name of a shape
PROMPT = 48  # tokens before the draft
STEPS = 5  # of a draft
ROW_WIDTH = 64  # ids of a draft token's row, as the pipeline asks for
OPTIONS = SamplingOptions()


@dataclass(frozen=True)
class StepTime:
    """Processor seconds of one drafting step."""

    layers: float  # all of the forward but the head
    head: float
    distribution: float  # softmax, order, rounding
    draw: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.layers + self.head + self.distribution + self.draw

    @property
    def head_and_distribution(self) -> float:
        """Their share of the step, which grows with the vocabulary."""
        return (self.head + self.distribution) / self.total


@dataclass(frozen=True)
class Measured:
    """A drafting step with a head of one size. Times are medians, of one thread's processor time."""

    drafter: str
    drawn_from: str
    keep: int  # ids of the head
    layers_ms: float
    head_ms: float
    softmax_ms: float  # with order and rounding
    draw_ms: float
    head_and_softmax: float  # share of the step
    faster: float  # the step with the whole head, over this one


@dataclass(frozen=True)
class DraftingSteps(Benchmark[Measured]):
    """What is measured."""

    drafters: tuple[str, ...]  # models' names, or `random:` and the name of a shape
    shares: tuple[float, ...]  # of the vocabulary that cut heads keep
    turns: int

    unit = "drafters"
    title = "Processor milliseconds of a drafting step, one thread"
    columns: ClassVar[Columns] = {
        "drafter": lambda one: one.drafter,
        "drawn from": lambda one: one.drawn_from,
        "keep": lambda one: f"{one.keep:,}",
        "layers": lambda one: f"{one.layers_ms:.2f}",
        "head": lambda one: f"{one.head_ms:.2f}",
        "softmax": lambda one: f"{one.softmax_ms:.2f}",
        "draw": lambda one: f"{one.draw_ms:.2f}",
        "step": lambda one: f"{one.layers_ms + one.head_ms + one.softmax_ms + one.draw_ms:.2f}",
        "head + softmax": lambda one: f"{one.head_and_softmax:.0%}",
        "faster": lambda one: f"{one.faster:.2f}×",
    }

    @property
    def total(self) -> int:
        """Drafters."""
        return len(self.drafters)

    def check(self) -> None:
        """Raises UsageError if a share is out of its range."""
        check_shares(self.shares)

    def measure(self, advance: Advance) -> Iterator[Measured]:
        """Each drafter with each head, drawing in both ways. Torch has one thread from here on."""
        for name in self.drafters:
            try:
                yield from self._steps(name)
            except (ModelLoadError, CannotPruneError) as error:
                raise CommandFailed(str(error)) from error
            advance()

    def _steps(self, name: str) -> Iterator[Measured]:
        model = model_of(name)
        size: int = len(model.get_output_embeddings().weight)
        keep = sizes_of(size, self.shares)
        for drawing in (from_rows(ROW_WIDTH), keyed(size)):
            times = step_times(model, keep, drawing, self.turns)
            for ids, one in zip(keep, times, strict=True):
                layers, head, softmax, draw = (MILLISECONDS * part for part in astuple(one))
                figures = (layers, head, softmax, draw, one.head_and_distribution, times[0].total / one.total)
                yield Measured(name, drawing.name, ids, *figures)


def check_shares(shares: Sequence[float]) -> None:
    """Raises UsageError if one is no share of a vocabulary."""
    for share in shares:
        if not 0 < share <= 1:
            raise UsageError(f"--share must be above 0 and at most 1, got {share}")


def sizes_of(size: int, shares: Sequence[float]) -> list[int]:
    """How many ids the shares of a vocabulary are, the whole of it first."""
    return sorted({size, *(max(1, round(size * share)) for share in shares)}, reverse=True)


@dataclass(frozen=True)
class Drawing:
    """How draft tokens are drawn."""

    name: str
    distribution: Callable[[Tensor], Any]  # to draw from, of one row of logits (1, V)
    draw: Callable[[Any, int], int]  # from the distribution, at an offset


def from_rows(row_width: int) -> Drawing:
    """At random from the `row_width` most probable ids, as for methods whose draft tokens carry rows."""
    draws = RandomDraws(np.random.default_rng(0))
    return Drawing(
        f"the {row_width} best",
        lambda logits: drafting_distributions(logits, OPTIONS, row_width)[0],
        lambda distribution, offset: draws.draw(distribution[0], distribution[1], offset),
    )


def keyed(size: int) -> Drawing:
    """With noise of all `size` ids of the vocabulary, as for `seeded`."""
    noise = KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size)
    clocks = Clocks(noise, torch.device("cpu"))
    return Drawing(
        "all, keyed",
        lambda logits: tempered(logits, OPTIONS),
        lambda distribution, offset: int(clocks.arrivals(distribution, [(NoiseKey(0), offset)]).argmin()),
    )


def model_of(name: str) -> PreTrainedModel:
    """A model by its name, or one with random weights by `random:` and the name of a shape; raises ModelLoadError."""
    if name.startswith(RANDOM):
        return random_model(name.removeprefix(RANDOM))
    return load_model(name, "float32").model


def step_times(model: PreTrainedModel, keep: Sequence[int], drawing: Drawing, turns: int) -> list[StepTime]:
    """Medians over `turns` drafts, for each number of ids that the head keeps.

    Heads take turns, draft by draft, so that whatever else the machine does meets all of them; the layers are the same
    for all, and so is their median. Which ids are kept does not change the time: they are the first ones. Torch has one
    thread from here on.

    Raises:
        CannotPruneError: the head of this model cannot be cut.
        ValueError: the engine cannot run this model.
    """
    torch.set_num_threads(1)
    engine = Engine(model, PROMPT + STEPS)
    whole = model.get_output_embeddings()
    heads = [whole if size >= len(whole.weight) else cut_of(whole, np.arange(size)) for size in keep]
    found: list[list[StepTime]] = [[] for _ in heads]
    try:
        for turn in range(1 + turns):
            for head, times in zip(heads, found, strict=True):
                model.set_output_embeddings(head)
                steps = _draft(engine, head, drawing)
                times += steps if turn else []  # the first turn warms up
    finally:
        model.set_output_embeddings(whole)
    layers = median(one.layers for times in found for one in times)
    return [replace(_medians(times), layers=layers) for times in found]


def _draft(engine: Engine, head: nn.Module, drawing: Drawing) -> list[StepTime]:
    ids = [1] * PROMPT
    engine.forward([ForwardRequest("draft", tuple(ids))])
    times = []
    for step in range(STEPS):
        with in_module(head) as watch:
            began = time.thread_time()
            (logits,) = engine.forward([ForwardRequest("draft", tuple(ids))])
            forwarded = time.thread_time()
        distribution = drawing.distribution(logits)
        made = time.thread_time()
        ids.append(drawing.draw(distribution, step))
        drawn = time.thread_time()
        times.append(StepTime(forwarded - began - watch.seconds, watch.seconds, made - forwarded, drawn - made))
    return times


def _medians(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(part) for part in zip(*map(astuple, times), strict=True)))
