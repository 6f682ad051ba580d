"""Toys: vocabularies of a handful of tokens, a tokenizer over them; table-driven models, whose distributions are pure
functions of their context; and the sessions of services that have them: what they were asked for, and what they say
next. Vocabularies are immutable and cached: enumerations make the same ones for each of their branches."""

import copy
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from zlib import crc32

import numpy as np

from crossdraft.engine.sampling.distributions import NothingLeftError
from crossdraft.session.events import Reply, Request
from crossdraft.text.letters import FIRST_CONTROL, NOTHING, Letters, Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types import messages
from crossdraft.types.rows import DraftToken, Ids, Row, Whose
from crossdraft.verification.chooser import Chooser


@lru_cache(maxsize=2**14)
def pseudo_distribution(salt: str, context: Hashable, size: int) -> np.ndarray:
    """A distribution over `size` ids that depends on the whole context, float64, shape (size,), read-only."""
    digest = hashlib.blake2b(f"{salt}/{context!r}".encode(), digest_size=2 * size).digest()
    weights = np.frombuffer(digest, dtype=np.uint16).astype(np.float64) ** 2 + 1.0
    distribution = weights / weights.sum()
    distribution.flags.writeable = False
    return distribution


def tempered(distribution: np.ndarray, temperature: float) -> np.ndarray:
    """The distribution at a temperature; 0 is one-hot."""
    if temperature == 1:
        return distribution
    weights = (
        (distribution == distribution.max()).astype(float) if temperature == 0 else distribution ** (1 / temperature)
    )
    return weights / weights.sum()


class LateSample(messages.Sample):
    """A sample whose token is drawn when somebody looks at it."""

    def __init__(self, draw: Callable[[], int]) -> None:
        object.__setattr__(self, "draw", draw)
        object.__setattr__(self, "log_probability", 0.0)

    def __getattribute__(self, name: str) -> object:
        if name == "token":
            return object.__getattribute__(self, "draw")()
        return object.__getattribute__(self, name)


@lru_cache(maxsize=2**14)
def _cut_row(distribution: bytes, head: int, listed: tuple[int, ...]) -> Row:
    """A target's row: so many ids with the largest probabilities, and those that are listed."""
    values = np.frombuffer(distribution)
    ids = np.array(sorted({*np.argsort(-values, kind="stable")[:head].tolist(), *listed}), dtype=np.int64)
    return Row(ids, values[ids], 0.0 if len(ids) == len(values) else 1.0 - float(values[ids].sum()))


@dataclass
class ToyTarget:
    """A target whose distribution depends on all ids since the prompt; answers like the service."""

    size: int
    head: int  # ids of a row that are sent unasked; `size` sends whole rows
    chooser: Chooser | None = None  # of its own draws
    temperature: float = 1.0
    salt: str = "target"
    states: bool = False  # it sends hidden states, of a byte

    def __post_init__(self) -> None:
        self._committed: tuple[int, ...] = ()
        self._latest: list[tuple[int, ...]] = []
        self._draws: dict[tuple[int, ...], int] = {}
        self.nodes = 0

    def reopened(self) -> "ToyTarget":
        """Another session with the same model: it knows nothing of the output, and draws alike."""
        other = copy.copy(self)
        other._committed, other._latest = (), []
        return other

    def distribution(self, path: tuple[int, ...]) -> np.ndarray:
        distribution = pseudo_distribution(self.salt, path, self.size)
        return tempered(distribution, self.temperature)

    def run(self, sent: messages.Pass) -> messages.PassDone:
        self._committed += sent.committed
        self._latest = [self._committed + path for path in sent.tree.paths()]
        answered = [self._latest[node] for node in sent.answered]
        self.nodes += len(answered)
        listed = sent.listed or (np.empty(0, dtype=np.int64),) * len(answered)
        nodes = [
            self._sample(path) if sent.draws else self._row(path, ids)
            for path, ids in zip(answered, listed, strict=True)
        ]
        states = bytes(crc32(repr(path).encode()) & 1 for path in answered)
        hidden = messages.HiddenStates(tuple(sent.answered), states) if self.states else messages.HiddenStates()
        return messages.PassDone(sent.number, tuple(nodes), 0.0, hidden=hidden)

    def draw(self, drawn: tuple[int, ...], number: int) -> messages.PassDone:
        """The next token of a run."""
        return messages.PassDone(number, (self._sample((*self._committed, *drawn)),), 0.0)

    def fetch(self, wanted: messages.FetchRow) -> messages.RowFetched:
        listed = np.arange(self.size) if wanted.listed is None else wanted.listed
        return messages.RowFetched(wanted.number, wanted.node, self._row(self._latest[wanted.node], listed))

    def _row(self, path: tuple[int, ...], listed: Ids) -> Row:
        distribution = np.asarray(self.distribution(path), dtype=np.float64)
        if not distribution.any():
            return Row(np.unique(listed), np.zeros(len(np.unique(listed))), 1.0)
        return _cut_row(distribution.tobytes(), self.head, tuple(listed.tolist()))

    def _sample(self, path: tuple[int, ...]) -> messages.Sample:
        """The same draw whenever the same path is asked for; drawn when it is looked at, to enumerate no more."""

        def draw() -> int:
            assert self.chooser is not None
            if path not in self._draws:
                self._draws[path] = self.chooser.categorical(self.distribution(path))
            return self._draws[path]

        return LateSample(draw)


@dataclass
class LimitedTarget(ToyTarget):
    """One whose request's limits leave nothing to draw after some outputs. Raises NothingLeftError: it is asked to."""

    ends: frozenset[tuple[int, ...]] = frozenset()

    def distribution(self, path: tuple[int, ...]) -> np.ndarray:
        return np.zeros(self.size) if path in self.ends else super().distribution(path)

    def run(self, sent: messages.Pass) -> messages.PassDone:
        done = super().run(sent)
        if self._latest[0] in self.ends and 0 in sent.answered:
            raise NothingLeftError
        return done

    def _sample(self, path: tuple[int, ...]) -> messages.Sample:
        return messages.Sample(0, messages.IMPOSSIBLE) if path in self.ends else super()._sample(path)


@lru_cache(maxsize=2**14)
def _toy_row(salt: str, text: Letters, size: int, allowed: tuple[int, ...] | None, temperature: float) -> Row:
    """A drafter's row over all ids, or those that are allowed."""
    distribution = pseudo_distribution(salt, text, size)
    ids = np.arange(size) if allowed is None else np.array(allowed)
    distribution = tempered(distribution[ids], temperature)
    return Row(ids.astype(np.int64), distribution / distribution.sum())


@dataclass
class ToyDrafter:
    """A drafter whose distribution depends on its text, and on the target's hidden states that it was told; draws
    through the given chooser.
    """

    letters: Sequence[Letters]
    chooser: Chooser
    allowed: Ids | None = None
    temperature: float = 1.0
    salt: str = "drafter"

    def __post_init__(self) -> None:
        self.text = Letters("")
        self.told: dict[int, bytes] = {}  # hidden states by letters of the output before

    def distribution(self, text: Letters) -> Row:
        allowed = None if self.allowed is None else tuple(self.allowed.tolist())
        salt = f"{self.salt}{self.told or ''}"
        return _toy_row(salt, text, len(self.letters), allowed, self.temperature)

    def score(self, wanted: messages.Score) -> messages.Scored:
        """By enumeration of its own distribution."""
        begin = Letters(self.text[: wanted.offset])
        found = [self._starts(begin, string, wanted.tokens) for string in wanted.strings]
        return messages.Scored(wanted.epoch, np.array(found, dtype=np.float64), 0.0)

    def _starts(self, text: Letters, string: str, tokens: int) -> float:
        """The probability that the next `tokens` draft tokens after `text` start with the string."""
        if not string or not tokens:
            return float(not string)
        row, total = self.distribution(text), 0.0
        for token, probability in zip(row.ids.tolist(), row.probabilities.tolist(), strict=True):
            letters = self.letters[token]
            if letters.startswith(string):
                total += probability
            elif probability and string.startswith(letters):
                total += probability * self._starts(Letters(text + letters), string[len(letters) :], tokens - 1)
        return total

    def spelled(self, draft_token: DraftToken) -> Letters:
        """A draft token's letters."""
        return self.letters[draft_token.token]

    def propose(self) -> DraftToken:
        row = self.distribution(self.text)
        token = int(row.ids[self.chooser.categorical(row.probabilities)])
        self.text = Letters(self.text + self.letters[token])
        return DraftToken(token, row)


@dataclass
class RedistributingDrafter(ToyDrafter):
    """Draws target tokens from Mᵀq', with q' its distribution over the allowed tokens and M some row-stochastic
    matrix.
    """

    target_letters: Sequence[Letters] = ()

    def spelled(self, draft_token: DraftToken) -> Letters:
        return self.target_letters[draft_token.token]

    def propose(self) -> DraftToken:
        own = self.distribution(self.text)
        size = len(self.target_letters)
        matrix = np.stack([pseudo_distribution("affinity", token, size) for token in own.ids.tolist()])
        distribution = own.probabilities @ matrix
        distribution = tempered(distribution, 0) if self.temperature == 0 else distribution
        token = self.chooser.categorical(distribution)
        self.text = Letters(self.text + self.target_letters[token])
        return DraftToken(token, Row(np.arange(size), distribution), Whose.TARGET)


def autoregressive_distribution(target: ToyTarget, stops: frozenset[int], length: int) -> dict[tuple[int, ...], float]:
    """The distribution of the target's own output: at most `length` tokens, shorter where a stop symbol ends it."""
    finished: dict[tuple[int, ...], float] = {}
    open_paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for path, weight in open_paths.items():
            distribution = target.distribution(path)
            if not distribution.any():  # nothing can be drawn: the request fails
                finished[path] = weight
            for token, probability in enumerate(distribution):
                if probability > 0:
                    kept = finished if token in stops else grown
                    kept[(*path, token)] = weight * float(probability)
        open_paths = grown
    return finished | open_paths


@dataclass
class TargetLane:
    """A toy target's session: requests are answered in order, a run token by token."""

    toy: ToyTarget
    asked: list[messages.Pass | messages.FetchRow] = field(default_factory=list)
    told: tuple[int, ...] = ()  # ids of output
    drawn: tuple[int, ...] = ()  # in the run that is under way
    most: int | None = None  # tokens of that run, if it was told so since

    def take(self, request: Request) -> None:
        if isinstance(request, messages.RunTo):
            assert any(isinstance(one, messages.Pass) and one.number == request.number for one in self.asked)
            self.most = request.tokens
            return
        assert isinstance(request, messages.Pass | messages.FetchRow), request
        self.asked.append(request)
        self.told += request.committed if isinstance(request, messages.Pass) else ()

    @property
    def owes(self) -> bool:
        return bool(self.asked)

    def reply(self) -> Reply:
        request = self.asked[0]
        if isinstance(request, messages.Pass) and request.run > 1:
            return self._draw(request)
        self.asked.pop(0)
        return self.toy.run(request) if isinstance(request, messages.Pass) else self.toy.fetch(request)

    def _draw(self, request: messages.Pass) -> messages.PassDone:
        assert request.draws
        assert not request.tree.tokens
        done = self.toy.draw(self.drawn, request.number) if self.drawn else self.toy.run(request)
        (sample,) = done.nodes
        assert isinstance(sample, messages.Sample)
        first = len(self.drawn)
        self.drawn = (*self.drawn, sample.token)
        more = len(self.drawn) < (request.run if self.most is None else self.most)
        if not more:
            self.asked.pop(0)
            self.drawn, self.most = (), None
        return replace(done, more=more, first=first)


@dataclass
class DrafterLane:
    """A toy drafter's session, which streams: a chunk of draft tokens a reply, each drawn when it is sent."""

    toy: ToyDrafter
    rows: bool  # draft tokens carry them, those of an adopted branch too
    draft: messages.Draft | None = None
    begin: Letters = NOTHING  # of the epoch: what it takes for the output
    wanted: int = 0
    sent: int = 0
    scores: list[messages.Score] = field(default_factory=list)
    # The latest epoch's branches: what each goes on from, since the start of the output, and its draft tokens.
    prepared: dict[int, tuple[Letters, list[DraftToken]]] = field(default_factory=dict)
    branches: int = 0  # of all epochs
    again: list[DraftToken] = field(default_factory=list)  # of an adopted branch, with rows

    def take(self, request: Request) -> None:
        match request:
            case messages.Draft():
                self._begin(request)
            case messages.Advance(epoch, count):
                assert self.draft is not None
                assert epoch == self.draft.epoch
                assert count > self.wanted or not count
                self.wanted = count
            case messages.Score():
                self.scores.append(request)
            case _:
                raise AssertionError(request)

    def _begin(self, draft: messages.Draft) -> None:
        assert self.draft is None or draft.epoch > self.draft.epoch
        assert draft.offset <= len(self.toy.text), "it is told of text that it does not know"
        self.toy.told |= draft.hidden.by_place()
        self.toy.text = Letters(self.toy.text[: draft.offset] + draft.letters)
        self.begin = self.toy.text
        self.draft, self.wanted, self.sent, self.scores, self.again = draft, draft.count, 0, [], []
        prepared, self.prepared = self.prepared, {}
        if draft.adopt:
            text, ahead = prepared[draft.adopt]
            assert text == self.toy.text, "a branch goes on from another text"
            self.again, self.sent = (list(ahead), 0) if self.rows else ([], len(ahead))
            if not self.rows:
                self.toy.text = Letters(self.toy.text + "".join(map(self.toy.spelled, ahead)))

    @property
    def owes(self) -> bool:
        return bool(self.scores) or (self.draft is not None and self.sent < self.wanted)

    @property
    def size(self) -> int:
        """Draft tokens of the next reply."""
        assert self.draft is not None
        full = self.draft.first - self.sent if self.sent < self.draft.first else self.draft.chunk
        return min(full, self.wanted - self.sent)

    def answer(self, request: Request) -> Reply:
        """The next reply after a request."""
        self.take(request)
        return self.reply()

    def reply(self) -> Reply:
        if self.scores:
            return self.toy.score(self.scores.pop(0))
        assert self.draft is not None
        first, draft = self.sent, self.draft
        draft_tokens: list[DraftToken] = []
        branches: list[messages.Branch] = []
        reason = ""
        for _ in range(self.size):
            before = self.toy.text
            draft_tokens.append(self._next())
            branches += self._branches(before, draft_tokens[-1], draft)
            self.sent += 1
            if draft.least_likely and draft_tokens[-1].token == 0:  # it ends by what it has drawn itself
                reason, self.wanted = "the rest is unlikely", self.sent
                break
        return messages.Drafted(draft.epoch, tuple(draft_tokens), 0.0, reason, first, tuple(branches))

    def _next(self) -> DraftToken:
        if not self.again:
            draft_token = self.toy.propose()
            return draft_token if self.rows else replace(draft_token, row=None)
        draft_token = self.again.pop(0)
        self.toy.text = Letters(self.toy.text + self.toy.spelled(draft_token))
        return draft_token

    def _branches(self, before: Letters, draft_token: DraftToken, draft: messages.Draft) -> list[messages.Branch]:
        """What would follow, had one of the likeliest others been drawn after `before`; in a tree, to its depth."""
        width, depth = draft.branch_width, draft.branch_depth
        if draft.tree_nodes:  # at most two leaves for each draft token, which begin alike where they are long
            width, depth = (0 if self.rows else 2), draft.count - self.sent - 1
        if not (width and (depth or draft.tree_nodes)) or draft_token.whose is Whose.TARGET:
            return []
        toy = copy.copy(self.toy)
        distribution = toy.distribution(before)
        order = sorted(range(len(distribution.ids)), key=lambda place: -distribution.probabilities[place])
        likely = dict.fromkeys(toy.letters[int(distribution.ids[place])] for place in order)
        others = [letters for letters in likely if letters != toy.spelled(draft_token)]
        found = []
        keys = others[:width] if not draft.tree_nodes else [*others[:1] * 2, *others[1:2]][:width]
        for letters in keys:
            text = toy.text = Letters(before + letters)
            ahead = [toy.propose() for _ in range(depth)]
            self.branches += 1
            self.prepared[self.branches] = text, ahead
            found.append(messages.Branch(self.branches, len(before), letters, tuple(one.token for one in ahead)))
        return found


def toy_vocabulary(letters: Sequence[str], stops: frozenset[int] = frozenset()) -> Vocabulary:
    """A vocabulary from its letters; the content of a control symbol is its id."""
    controls = [(token, f"<{token}>", ord(text)) for token, text in enumerate(letters) if ord(text[0]) >= FIRST_CONTROL]
    return Vocabulary(
        letters=tuple(Letters(text) for text in letters),
        stops=stops,
        nameless=tuple((token, content) for token, content, point in controls if point >= Side.TARGET.value),
        names={token: content for token, content, _ in controls},
    )


def pair_of(target: Sequence[str], drafter: Sequence[str], stops: frozenset[int] = frozenset()) -> Pair:
    """A pair of toy vocabularies; stop ids are the target's."""
    return _pair(tuple(target), tuple(drafter), stops)


@lru_cache(maxsize=256)
def _pair(target: tuple[str, ...], drafter: tuple[str, ...], stops: frozenset[int]) -> Pair:
    return Pair(toy_vocabulary(target, stops), toy_vocabulary(drafter))


@lru_cache(maxsize=256)
def greedy_tokens(vocabulary: Vocabulary) -> Callable[[Letters], tuple[int, ...]]:
    """A tokenizer of toys: the longest token that fits, again and again; stops where none fits."""

    @lru_cache(maxsize=4096)
    def encode(letters: Letters) -> tuple[int, ...]:
        ids: list[int] = []
        while letters:
            fitting = [token for token, text in enumerate(vocabulary.letters) if letters.startswith(text)]
            if not fitting:
                break
            best = max(fitting, key=lambda token: len(vocabulary.letters[token]))
            ids.append(best)
            letters = Letters(letters[len(vocabulary.letters[best]) :])
        return tuple(ids)

    return encode
