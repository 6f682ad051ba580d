"""The engine's pass beside a bare forward of the same model over the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.models.loading import load_model
from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.models.packing import pack
from crossdraft.models.support import embedding_weight
from crossdraft.models.timing import Floor, clock_of, floor_of, spent_in
from crossdraft.verification.trees import ROOT, TokenTree

WARM_UP = 2  # turns that do not count


@dataclass(frozen=True)
class Load:
    """A pass."""

    sessions: int
    tokens: int  # of each session: one committed token and a chain of nodes


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
        texts = [Work(name, self._text(name), wanted=()) for name in self._names]
        self._engine.forward(texts)
        if self._engine.taken < len(texts):
            raise NumberOutOfRangeError(
                f"the budget holds {self._engine.taken} sessions of {self._context} tokens, and {len(texts)} are "
                "measured: raise it"
            )
        nodes = self._load.tokens - 1
        parents = tuple(range(ROOT, nodes - 1))
        works = [
            Work(text.session, (*text.context, first), TokenTree(tuple(rest), parents))
            for text, (first, *rest) in zip(texts, fed, strict=True)
        ]
        with spent_in(self._engine.forwards, self._clock) as inside:
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
    engine = Engine(mine, length, budget, static=False if eager else None)
    return engine_times(engine, bare, loads, context, turns), floor, engine.captured
