"""`crossdraft bench engine`: the engine's pass beside a bare forward of the same model over the same tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from crossdraft.bench.harness import markdown, print_table, write_json, write_text
from crossdraft.bench.made_up_models import random_model
from crossdraft.console.running import CommandFailed, Misused, check_output, warnings_shown
from crossdraft.engine.compatibility import embedding_weight
from crossdraft.engine.distributions import drafting_distributions, tempered
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import cut_of, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.runner import ModelRunner
from crossdraft.engine.sampler import Clocks, Distribution, RandomDraws
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from crossdraft.verification.noise import KeyedNoise

MILLISECONDS = 1000.0
GB = 1e9  # bytes
HEADINGS = (
    *("sessions", "tokens each", "engine, ms", "of it in the model", "bare, ms", "engine / bare"),
    *("engine / each alone", "logits apart by"),
)


# The engine's pass beside a bare forward of the same model over the same tokens.


@dataclass(frozen=True)
class Load:
    """A pass."""

    sessions: int
    tokens: int  # of each session: one committed token and a chain of nodes


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: str  # a model's name
    dtype: str
    device: str
    mib: int  # for keys and values
    loads: tuple[Load, ...]
    context: int  # tokens of each session before the pass
    turns: int
    enforce_eager: bool = False


def loads_of(texts: Sequence[str]) -> tuple[Load, ...]:
    """From SESSIONSxTOKENS each; raises Misused."""
    return tuple(map(_load, texts))


def _load(text: str) -> Load:
    try:
        sessions, tokens = map(int, text.split("x"))
    except ValueError as error:
        raise Misused(f"--load takes SESSIONSxTOKENS such as 16x6, got {text!r}") from error
    if sessions < 1 or tokens < 1:
        raise Misused(f"--load takes 1 or more sessions and tokens, got {text}")
    return Load(sessions, tokens)


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None = None) -> None:
    """Measures all loads; a table on stdout, and files if paths are given.

    Raises:
        Misused: a number does not fit the model.
        CommandFailed: the model cannot be loaded or run.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    try:
        where = (plan.target, plan.dtype, plan.device, plan.mib)
        with warnings_shown():
            times, floor, captured = times_of(*where, plan.loads, plan.context, plan.turns, plan.enforce_eager)
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except (ModelLoadError, ValueError) as error:
        raise CommandFailed(str(error)) from error
    text = report(plan, times, floor, captured)
    print(text, end="")
    if markdown_path is not None:
        write_text(markdown_path, text)
    if json_path is not None:
        figures = [asdict(one) | {"overhead": one.overhead, "beside_alone": one.beside_alone} for one in times]
        write_json(json_path, {"plan": asdict(plan), "floor": asdict(floor), "times": figures, "captured": captured})


@dataclass(frozen=True)
class PassTime:
    """Medians, in seconds of one thread on a CPU, and of the clock elsewhere."""

    load: Load
    engine: float  # `Engine.forward`
    model: float  # ... of it in the model
    bare: float  # one `model(...)` with a StaticCache for all sessions, as rows of one batch
    alone: float  # the same for a single session
    difference: float  # largest, between logits of both

    @property
    def overhead(self) -> float:
        """The engine's time, as a multiple of the bare one."""
        return self.engine / self.bare

    @property
    def beside_alone(self) -> float:
        """... of bare forwards of each session by itself."""
        return self.engine / (self.load.sessions * self.alone)


# Clocks of devices, what a model's forwards take, and what its weights alone take.


@dataclass(frozen=True)
class Floor:
    """What no pass of a model can be faster than on a device that reads all weights for it."""

    weights: int  # bytes that a forward reads: all but the embedding's
    bandwidth: float  # bytes a second of a matrix times a vector, of which memory sees every number once

    @property
    def seconds(self) -> float:
        """Of a pass."""
        return self.weights / self.bandwidth


def report(plan: Plan, times: Sequence[PassTime], floor: Floor, captured: int) -> str:
    """A table, and what the weights alone take."""
    graphs = (
        "" if plan.device == "cpu" else f" Shapes of the engine's forwards that were captured as graphs: {captured}."
    )
    return (
        f"{markdown(HEADINGS, [_row(one) for one in times])}\n{plan.target} in {plan.dtype} on {plan.device}, after "
        f"texts of {plan.context} tokens. A pass reads {floor.weights / GB:.2f} GB of weights, which takes "
        f"{MILLISECONDS * floor.seconds:.2f} ms at the {floor.bandwidth / GB:.1f} GB a second that were measured."
        f"{graphs}\n"
    )


def _row(one: PassTime) -> tuple[str, ...]:
    return (
        *(str(one.load.sessions), str(one.load.tokens)),
        *(f"{MILLISECONDS * seconds:.2f}" for seconds in (one.engine, one.model, one.bare)),
        *(f"{one.overhead:.3f}", f"{one.beside_alone:.3f}", f"{one.difference:.1g}"),
    )


WARM_UP = 2  # turns that do not count


def engine_times(
    engine: Engine, bare: PreTrainedModel, loads: Sequence[Load], context: int, turns: int
) -> list[PassTime]:
    """Times of some loads, after texts of `context` tokens; both ways and all loads take turns.

    Args:
        engine: of a model that it has to itself.
        bare: the same model, loaded once more.
        loads: at least one; a single session with as many tokens as each is measured besides.
        context: tokens of each session before the pass.
        turns: that count.
    """
    alone = [Load(1, load.tokens) for load in loads]
    races = {load: Race(engine, bare, load, context) for load in dict.fromkeys((*alone, *loads))}
    for turn in range(WARM_UP + turns):
        for race in races.values():
            race.run(turn, counts=turn >= WARM_UP)
    return [
        PassTime(
            load,
            median(races[load].engine),
            median(races[load].model),
            median(races[load].bare),
            median(races[Load(1, load.tokens)].bare),
            races[load].difference,
        )
        for load in loads
    ]


@dataclass(eq=False)
class Race:
    """Both ways over one load. The tokens differ from turn to turn, as the engine does not feed again what it holds."""

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
        """One pass in each way, whichever is first."""
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
        with spent_in(self._engine.runner, self._clock) as inside:
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


def times_of(
    name: str, dtype: str, device: str, budget: int, loads: Sequence[Load], context: int, turns: int, eager: bool
) -> tuple[list[PassTime], Floor, int]:
    """The same for a model by its name, as a service runs it, its floor, and how many forwards were captured.

    Torch has one thread from here on. If `eager`, no forward is captured.

    Raises:
        ModelLoadError: it cannot be loaded.
        ValueError: the budget or the context does not fit, or the engine cannot run it.
    """
    torch.set_num_threads(1)
    mine, bare = (load_model(name, dtype, device).model for _ in range(2))
    floor = floor_of(bare)
    for model in (mine, bare):
        pack(model)
    length = context + max(load.tokens for load in loads)
    engine = Engine(mine, length, budget, graphs=False if eager else None)
    return engine_times(engine, bare, loads, context, turns), floor, engine.captured


# How long a pass takes, as a function of the nodes of its tree.

PROMPT = 64  # tokens before the tree


def pass_times(model: PreTrainedModel, nodes: Sequence[int], turns: int) -> list[float]:
    """Median processor seconds of a pass of one committed token and a chain of so many nodes, for each number.

    All numbers take their turn, so that whatever else the machine does meets all of them. Torch has one thread from
    here on.

    Raises:
        ValueError: the engine cannot run this model.
    """
    torch.set_num_threads(1)
    engine = Engine(model, PROMPT + max(nodes) + 1)
    prompt = tuple(range(1, PROMPT + 1))
    engine.forward([ForwardRequest("pass", prompt)])
    found: list[list[float]] = [[] for _ in nodes]
    for turn in range(1 + turns):
        for count, times in zip(nodes, found, strict=True):
            tree = TokenTree((0,) * count, tuple(range(ROOT, count - 1)))
            began = time.thread_time()
            engine.forward([ForwardRequest("pass", (*prompt, turn % 2), tree)])
            times += [time.thread_time() - began] if turn else []  # the first turn warms up
            engine.forward([ForwardRequest("pass", prompt, wanted=())])
    return [median(times) for times in found]


# Where the time of a drafting step goes: layers, LM head, distribution, draw; with the whole head and with cut ones.
#
# What is counted is the processor time of one thread, which other work on the machine hardly changes.

RANDOM = "random:"  # before the name of a shape
STEPTIME_PROMPT = 48  # tokens before the draft
STEPS = 5  # of a draft
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
        """Their share, which grows with the vocabulary."""
        return (self.head + self.distribution) / self.total


class Drawing(Protocol):
    """How draft tokens are drawn."""

    def distribution(self, logits: Tensor) -> Any:
        """What is drawn from, of one row of logits (1, V)."""
        ...

    def draw(self, distribution: Any, offset: int) -> int:
        """A draw from it."""
        ...


class FromRows:
    """At random from the most probable ids, as for methods whose draft tokens carry rows."""

    def __init__(self, row_width: int) -> None:
        """`row_width`: as in `OpenDrafter`."""
        self._row_width = row_width
        self._draws = RandomDraws(np.random.default_rng(0))

    def distribution(self, logits: Tensor) -> Distribution:
        """As in `Drawing`."""
        (distribution,) = drafting_distributions(logits, OPTIONS, self._row_width)
        return distribution

    def draw(self, distribution: Distribution, offset: int) -> int:
        """As in `Drawing`."""
        return self._draws.draw(*distribution, offset)


class Keyed:
    """With noise of all of `size` ids, as for `seeded`."""

    def __init__(self, size: int) -> None:
        """`size`: ids of the vocabulary."""
        noise = KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size)
        self._clocks = Clocks(noise, torch.device("cpu"))

    def distribution(self, logits: Tensor) -> Tensor:
        """As in `Drawing`."""
        return tempered(logits, OPTIONS)

    def draw(self, distribution: Tensor, offset: int) -> int:
        """As in `Drawing`."""
        return int(self._clocks.arrivals(distribution, [(NoiseKey(0), offset)]).argmin())


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
    engine = Engine(model, STEPTIME_PROMPT + STEPS)
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
    ids = [1] * STEPTIME_PROMPT
    engine.forward([ForwardRequest("draft", tuple(ids))])
    times = []
    for step in range(STEPS):
        with _timed(head) as spent:
            began = time.thread_time()
            (logits,) = engine.forward([ForwardRequest("draft", tuple(ids))])
            forwarded = time.thread_time()
        distribution = drawing.distribution(logits)
        made = time.thread_time()
        ids.append(drawing.draw(distribution, step))
        drawn = time.thread_time()
        times.append(StepTime(forwarded - began - spent.seconds, spent.seconds, made - forwarded, drawn - made))
    return times


def _medians(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(part) for part in zip(*map(astuple, times), strict=True)))


@dataclass
class _Spent:
    """Seconds in a module."""

    seconds: float = 0.0
    began: float = field(default=0.0, repr=False)


@contextmanager
def _timed(module: nn.Module) -> Iterator[_Spent]:
    spent = _Spent()

    def before(*_: object) -> None:
        spent.began = time.thread_time()

    def after(*_: object) -> None:
        spent.seconds += time.thread_time() - spent.began

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


TURNS = 10  # of a measurement of bandwidth
MATRIX = 1 << 30  # bytes of its matrix, which no cache must hold
AT_ONCE = 8  # products that another device than a CPU does in a turn: to launch one, and to wait, takes time as well


@dataclass(eq=False)
class Inside:
    """Seconds in a model."""

    seconds: float = 0.0


@contextmanager
def spent_in(runner: ModelRunner, clock: Callable[[], float]) -> Iterator[Inside]:
    """Counts the seconds that its forwards take in the block; hooks of the model see nothing of those captured."""
    inside, before = Inside(), runner.inside

    @contextmanager
    def counted() -> Iterator[None]:
        began = clock()
        yield
        inside.seconds += clock() - began

    runner.inside = counted
    try:
        yield inside
    finally:
        runner.inside = before


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
    for _ in range(TURNS):
        began = clock()
        for _ in range(products):
            torch.mv(matrix, vector)
        times.append((clock() - began) / products)
    return Floor(weights, matrix.numel() * matrix.itemsize / min(times))


def described(name: str) -> str:
    """What the device of a name is, and the versions of what drives it."""
    device = torch.device(name)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        return f"{device}; {versions}"
    found = torch.cuda.get_device_properties(device)
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{found.name}, {found.total_memory >> 20} MiB; {versions}, {cuda}"


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


# `crossdraft bench head`: how much of a drafting step is LM head and softmax, with whole and with cut heads.

ROW_WIDTH = 64  # ids of a draft token's row, as the pipeline asks for
COLUMNS = ("drafter", "drawn from", "keep", "layers", "head", "softmax", "draw", "step", "head + softmax", "faster")


@dataclass(frozen=True)
class Measured:
    """A drafting step with a head of one size. Times are medians, of one thread's processor time."""

    drafter: str
    drawn_from: str
    keep: int  # ids of the head
    layers_ms: float
    head_ms: float
    softmax_ms: float  # and order, and rounding
    draw_ms: float
    head_and_softmax: float  # share of the step
    faster: float  # the step with the whole head, over this one


def head_measure(drafters: Sequence[str], shares: Sequence[float], turns: int, json_path: Path | None) -> None:
    """Measures every drafter; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a share is out of its range.
        CommandFailed: a model cannot be loaded, or its head cannot be cut.
    """
    check_shares(shares)
    measured = [one for name in drafters for one in _measured(name, shares, turns)]
    print_table("Processor milliseconds of a drafting step, one thread", COLUMNS, [shown(one) for one in measured])
    if json_path is not None:
        write_json(json_path, {"turns": turns, "steps": [asdict(one) for one in measured]})


def check_shares(shares: Sequence[float]) -> None:
    """Raises Misused if one is no share of a vocabulary."""
    for share in shares:
        if not 0 < share <= 1:
            raise Misused(f"--share must be above 0 and at most 1, got {share}")


def sizes_of(size: int, shares: Sequence[float]) -> list[int]:
    """How many ids the shares of a vocabulary are, the whole of it first."""
    return sorted({size, *(max(1, round(size * share)) for share in shares)}, reverse=True)


def _measured(name: str, shares: Sequence[float], turns: int) -> list[Measured]:
    try:
        model = model_of(name)
        size: int = len(model.get_output_embeddings().weight)
        keep = sizes_of(size, shares)
        ways: dict[str, Drawing] = {f"the {ROW_WIDTH} best": FromRows(ROW_WIDTH), "all, keyed": Keyed(size)}
        return [
            _of(name, way, ids, time, times[0])
            for way, drawing in ways.items()
            for times in [step_times(model, keep, drawing, turns)]
            for ids, time in zip(keep, times, strict=True)
        ]
    except ModelLoadError as error:
        raise CommandFailed(str(error)) from error


def _of(name: str, way: str, keep: int, time: StepTime, whole: StepTime) -> Measured:
    layers, head, softmax, draw = (MILLISECONDS * part for part in astuple(time))
    return Measured(name, way, keep, layers, head, softmax, draw, time.head_and_distribution, whole.total / time.total)


def shown(one: Measured) -> tuple[str, ...]:
    """A row of the table."""
    parts = (one.layers_ms, one.head_ms, one.softmax_ms, one.draw_ms)
    times = (f"{part:.2f}" for part in (*parts, sum(parts)))
    return (one.drafter, one.drawn_from, f"{one.keep:,}", *times, f"{one.head_and_softmax:.0%}", f"{one.faster:.2f}×")
