"""What a session's draft tokens are: the drafter's own tokens, or the target's through an affinity matrix (`rdk`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import field, replace

import numpy as np

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.conversation import matcher_of
from crossdraft.engine.model_thread import Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.clocks import Clocks, Moment
from crossdraft.engine.sampling.distributions import Columns, Logits, masked, narrowed
from crossdraft.engine.sampling.paths import draw_path
from crossdraft.engine.sampling.sampler import (
    Distribution,
    DistributionRequest,
    Draw,
    DrawRequest,
    SamplerSteps,
    TopRequest,
    TopRow,
)
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.affinity import Affinity
from crossdraft.text.grammar import Bits, GrammarError, GrammarMatcher
from crossdraft.text.letters import Letters
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import NoiseKey, OpenDrafter, SamplingOptions
from crossdraft.types.rows import Ids, Probabilities, Whose
from crossdraft.verification.noise import KeyedNoise

# What requests about draws have in common: the arguments of `DrawRequest`.
Asked = tuple[Logits, SamplingOptions, Clocks, Sequence[Moment], bool, int, Columns | None]


@quick_dataclass(frozen=True, eq=False)
class Draws:
    """Draws of a session: with a key the same draw for the same offset, always; without one a fresh draw each time."""

    noise: KeyedNoise
    key: NoiseKey | None
    generator: np.random.Generator = field(default_factory=np.random.default_rng)  # of fresh keys

    def at(self, offset: int) -> Moment:
        """What a draw is keyed by, at so many letters since the start of the output."""
        return self.key or NoiseKey(self.generator.bit_generator.random_raw()), offset


class DrawSource(ABC):
    """What draft tokens are drawn from, with the noise of the vocabulary whose ids they use; None: all may be drawn.
    Raises BadRequest: the grammar cannot be compiled."""

    whose: Whose  # whose ids the draft tokens use
    has_paths = False  # whether several tokens may be drawn without a look at the text between them

    def __init__(self, running: RunningModel, opening: OpenDrafter, noise: KeyedNoise, allowed: Ids | None) -> None:
        self._running = running
        self._opening = opening
        self._draws = Draws(noise, opening.noise)
        columns = running.columns(allowed)
        with running.thread.on_stream():
            self._columns = None if columns is None else Columns.of(columns, running.thread.engine.device)
        self.obstacle = ""  # why there is nothing to draw; empty if there is
        if columns is not None and not len(columns):
            kept_none = allowed is not None and len(allowed)
            self.obstacle = "none of the shared tokens is kept" if kept_none else "the two vocabularies share no token"
        self.masking = False  # whether drafts are kept to the grammar: the same in all of an epoch
        self._matcher: GrammarMatcher | None = None
        if opening.options.grammar is not None:
            self._matcher = matcher_of(running.grammars, opening.options.grammar)

    def begin(self, epoch: int) -> None:
        """An epoch begins, with draws of its own if these are audited. Where the grammar takes long it is not kept to,
        as other sessions would wait for it."""
        self.masking = self._matcher is not None and not self._matcher.slow
        if (key := self._opening.noise) is not None and self._opening.audited:
            self._draws = replace(self._draws, key=NoiseKey(key.seed, epoch))

    def masks(self, text: Letters, paths: Iterable[Letters]) -> "Future[Bits] | None":
        """By the grammar, for the rows after an output with each of some paths: made in another thread meanwhile."""
        if self._matcher is None or not self.masking:
            return None
        return self._matcher.begin(text, list(paths), must=False)

    def masked(self, logits: Logits, masks: "Future[Bits] | None") -> Logits:
        """The rows (n, V) with their masks, but where a mask leaves no id that may be used: any draft is refused there.
        Raises NoRoomError: the grammar has exceeded a limit."""
        if masks is None or not len(logits):
            return logits
        try:
            found = masks.result()
        except GrammarError as error:
            raise NoRoomError(str(error)) from error
        usable = np.unpackbits(found, 1, logits.shape[1], "little")
        usable = usable if self._columns is None else usable[:, self._columns.numbers]
        return masked(logits, np.where(usable.any(1, keepdims=True), found, np.uint8(0xFF)))

    @abstractmethod
    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        """The distributions that are drawn from, one of each row of logits (n, V), exactly as they travel."""

    @abstractmethod
    def draw(self, logits: Logits, offsets: Sequence[int], besides: int) -> SamplerSteps[list[Draw]]:
        """A draw from the distribution of each row of logits (n, V); offsets are letters since the start of the output.

        Of the first row so many ids besides the draw are wanted, the best first; fewer where there are fewer.
        """

    def likeliest(
        self, logits: Logits, offsets: Sequence[int], count: int, forward: ForwardRequest | None = None, beside: int = 0
    ) -> SamplerSteps[Sequence[TopRow]]:
        """After each row of logits (n, V) the ids that the target is likeliest to go on with, as `TopRequest`."""
        rows: Sequence[TopRow] = yield TopRequest(*self._asked(logits, offsets, count), forward, beside)
        return rows

    def path(self, forward: ForwardRequest, offset: int) -> Job[tuple[list[Draw], float]]:
        """As `draw_path`, for tokens from an offset on, in letters since the start of the output."""
        opening, at = self._opening, self._draws.at(offset)
        return draw_path(forward, opening.options, self._running.clocks, at, opening.row_width, self._columns)

    @abstractmethod
    def append(self, context: Context, token: int) -> None:
        """The text goes on with a token that was drawn."""

    def _asked(self, logits: Logits, offsets: Sequence[int], count: int) -> Asked:
        at, keyed = list(map(self._draws.at, offsets)), self._draws.key is not None
        return logits, self._opening.options, self._running.clocks, at, keyed, count, self._columns

    def _own_distributions(self, logits: Logits, row_width: int) -> SamplerSteps[list[Distribution]]:
        found = yield DistributionRequest(logits, self._opening.options, row_width, self._columns)
        return [(self._running.clocks.named(columns), weights) for columns, weights in found]


class OwnTokens(DrawSource):
    """Draft tokens are tokens of the drafter's."""

    whose = Whose.DRAFTER

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        super().__init__(running, opening, running.clocks.noise, opening.allowed)
        self.has_paths = opening.options.grammar is None

    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        return self._own_distributions(logits, self._opening.row_width)

    def draw(self, logits: Logits, offsets: Sequence[int], besides: int) -> SamplerSteps[list[Draw]]:
        found = yield DrawRequest(*self._asked(logits, offsets, besides), self._opening.row_width)
        return list(found)

    def append(self, context: Context, token: int) -> None:
        context.append(token)


class TargetTokens(DrawSource):
    """Draft tokens are tokens of the target's, drawn from Mᵀq′ (RDK, Algorithm 1).

    q′ is the drafter's distribution over T∩D at temperature 1, with its truncations; Mᵀq′ then gets the temperature and
    is cut to the row's width and rounded. At temperature 0 the mass of several draft tokens that are one target token's
    decides: the likeliest draft token alone would be spread over its neighbours.
    """

    whose = Whose.TARGET

    def __init__(self, running: RunningModel, opening: OpenDrafter, affinity: Affinity, noise: KeyedNoise) -> None:
        shared = affinity.matrix.drafter_ids
        allowed = shared if opening.allowed is None else np.intersect1d(shared, opening.allowed)
        self._temperature = opening.options.temperature
        opening = replace(opening, options=replace(opening.options, temperature=1.0))
        super().__init__(running, opening, noise, allowed)
        self._affinity = affinity

    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        own = yield from self._own_distributions(logits, 0)
        found = (self._affinity.matrix.redistribute(*distribution) for distribution in own)
        return [narrowed(*self._tempered(*distribution), self._opening.row_width) for distribution in found]

    def draw(self, logits: Logits, offsets: Sequence[int], besides: int) -> SamplerSteps[list[Draw]]:
        """Of the drafts of a target's tokens there are no branches: nothing is wanted besides."""
        found, draws = zip((yield from self.distributions(logits)), offsets, strict=True), self._draws
        return [Draw(draws.noise.draw(*one, *draws.at(offset)), one) for one, offset in found]

    def _tempered(self, ids: Ids, weights: Probabilities) -> Distribution:
        """At the drafter's temperature."""
        if not self._temperature:
            return ids[[weights.argmax()]], np.ones(1)
        sharpened = (weights / weights.max()) ** (1.0 / self._temperature)
        return ids, sharpened / sharpened.sum()

    def append(self, context: Context, token: int) -> None:
        context.rewind(context.offset, self._affinity.letters[token])
