"""A made-up language, and services that answer from it: real servers and messages without models.

    python -m crossdraft.bench.made_up target|drafter METHOD SIZE MILLISECONDS

They answer one method's sessions, with rows of 64 ids over vocabularies of SIZE; a pass, or a draft token, takes so
many milliseconds, which are slept. Tokens are strings of letters made by merges, as byte-level BPE makes them. Target
and drafter expect one continuation of any text, a fixed function of its last letters and of how long it is, and give
most of their probability to its tokens.
"""

import asyncio
import json
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Thread
from zlib import crc32

import numpy as np
from tokenizers import pre_tokenizers

from crossdraft.console.processes import Wanted, end_with_stdin
from crossdraft.drafter.conversation import Conversation, Epoch, ReplyBuffer, Send
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.handlers import DRAFTER, TARGET, Replies
from crossdraft.rpc.server import Listening, Server, Serving, run, serve
from crossdraft.session.events import Command, Event, Open, Ready, Replied
from crossdraft.session.events import Reply as Reply_of_events
from crossdraft.session.events import Request as Request_of_events
from crossdraft.session.events import Send as Sent
from crossdraft.text.letters import NOTHING, Letters, Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from crossdraft.types.messages import (
    Branch,
    Description,
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Sample,
    Score,
    Scored,
    ScorePrompt,
)
from crossdraft.types.rows import NO_IDS, DraftToken, Ids, Probabilities, Row, Whose
from crossdraft.types.trees import Path
from crossdraft.verification.chooser import Chooser, RandomChooser
from crossdraft.verification.methods import Method, method_named
from crossdraft.verification.noise import KeyedNoise

WIDTH = 64  # ids of a row
CONTEXT = 100_000  # tokens
SHARED_MERGES = 0.6  # of a vocabulary: the first merges of both are the same
LONGEST = 14  # letters of a token
EXPECTED = 0.8  # the probability of the tokens that the expected text begins with
DISAGREEMENT = 1.5  # gives an acceptance of 0.5 to 0.7
OTHERS = 1200  # other tokens that a distribution gives some probability
LETTERS = " etaoinshrdlucmfwypvbgkqjxz"
_CUMULATIVE = list(accumulate((6.0, *(1 / (place + 2) for place in range(26)))))
SPACE = "Ġ"  # how byte-level BPE writes a space


# The made-up vocabularies and distributions.


def tokenizer_json(size: int, seed: int) -> str:
    """A byte-level BPE tokenizer with `size` ids; two seeds have the merges up to SHARED_MERGES in common."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in _merges(size, seed):
        if len(vocabulary) == size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole: dict[str, object] = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
    }
    whole |= {"decoder": byte_level, "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    return json.dumps(whole)


def _merges(size: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of pieces that exist already, the older ones more often; each new piece also after a space."""
    rng = np.random.default_rng(0)
    pieces, known = list(LETTERS[1:]), set(LETTERS[1:])
    common = True
    while True:
        if common and len(pieces) > SHARED_MERGES * size / 2:
            rng, common = np.random.default_rng(seed), False
        for first, second in rng.random((100, 2)).tolist():
            left, right = pieces[int(first**4 * len(pieces))], pieces[int(second**4 * len(pieces))]
            if len(left + right) < LONGEST and left + right not in known:
                pieces.append(left + right)
                known.add(left + right)
                yield left, right
                yield SPACE, left + right


def tokenization(size: int, side: Side) -> Tokenization:
    """A made-up tokenizer with its letters; those of the two sides have some tokens in common."""
    text = tokenizer_json(size, seed=side.value)
    return Tokenization(text, Vocabulary.build(text, size, (), (), side))


@dataclass(frozen=True, eq=False)
class Language:
    """What both models expect, and how far they agree about the rest."""

    pair: Pair
    disagreement: float  # standard deviation of the logarithm of a drafter's probability about the target's

    def expected(self, text: Letters, count: int) -> Letters:
        """The next `count` letters."""
        last, length = text[-2:], len(text)
        for offset in range(length, length + count):
            chance = crc32(f"{last[-2:]}/{offset}".encode()) / 2**32
            last += LETTERS[bisect_right(_CUMULATIVE, chance * _CUMULATIVE[-1])]
        return Letters(last[min(2, length) :])

    def target_row(self, text: Letters, width: int, listed: Ids) -> Row:
        """The target's row after `text`: its most probable ids, those listed, and the rest as tail."""
        distribution = self._distribution(text, self.pair.target, drafted=False)
        return _cut(distribution, width, listed)

    def drafter_row(self, text: Letters, width: int, *, shared: bool, redistributed: bool) -> Row:
        """A row that the drafter draws from: whole, over its own ids, those of T∩D, or target ids."""
        vocabulary = self.pair.target if redistributed else self.pair.drafter
        ids, weights = self._distribution(text, vocabulary, drafted=True)
        if shared and not redistributed:
            known = self.pair.to_target_ids(ids) >= 0
            ids, weights = ids[known], weights[known]
        return Row.of(ids[:width], weights[:width])

    def _distribution(self, text: Letters, vocabulary: Vocabulary, *, drafted: bool) -> tuple[Ids, Probabilities]:
        """Ids by falling probability."""
        begins = self.expected(text, LONGEST)
        prefixes = [known[0] for end in range(LONGEST, 0, -1) if (known := vocabulary.ids_of(Letters(begins[:end])))]
        seed = crc32(f"{text[-8:]}/{len(text)}".encode())
        rng = np.random.default_rng((seed, drafted))
        shared = np.random.default_rng(seed).integers(len(self.pair.shared_drafter_ids), size=OTHERS)
        ids = self.pair.shared_drafter_ids[shared]
        ids = ids if vocabulary is self.pair.drafter else self.pair.to_target_ids(ids)
        ids[2::3] = rng.integers(vocabulary.size, size=len(ids[2::3]))  # a third of its own
        weights = np.append(0.35 ** np.arange(len(prefixes)), 1.0 / np.arange(4, 4 + OTHERS))
        weights[: len(prefixes)] *= EXPECTED / weights[: len(prefixes)].sum()
        weights[len(prefixes) :] *= (1 - EXPECTED) / weights[len(prefixes) :].sum()
        weights *= np.exp(self.disagreement * rng.standard_normal(len(weights))) if drafted else 1.0
        ids, first = np.unique(np.append(prefixes, ids).astype(np.int64), return_index=True)
        weights = weights[first] / weights[first].sum()
        order = np.argsort(-weights, kind="stable")
        return ids[order], weights[order]


def _cut(distribution: tuple[Ids, Probabilities], width: int, listed: Ids) -> Row:
    """The head, the listed ids that are not in it, and the tail."""
    whole = Row(*distribution)
    ids = np.concatenate([distribution[0][:width], np.setdiff1d(listed, distribution[0][:width])])
    probabilities = whole.probabilities_of(ids)
    return Row(ids, probabilities, 0.0 if width >= len(whole.ids) else max(0.0, 1.0 - float(probabilities.sum())))


@dataclass(frozen=True, eq=False)
class Noises:
    """The keyed noise of both vocabularies, which `seeded` draws with."""

    target: KeyedNoise
    drafter: KeyedNoise

    @staticmethod
    def of(pair: Pair) -> "Noises":
        return Noises(KeyedNoise.of(pair.target), KeyedNoise.of(pair.drafter))


@dataclass(frozen=True, eq=False)
class Guesser:
    """What draws draft tokens of a made-up language."""

    language: Language
    noises: Noises
    method: Method
    width: int  # ids of a row
    key: NoiseKey
    chooser: Chooser

    def row(self, text: Letters) -> Row:
        """What a draft token after a text is drawn from."""
        method = self.method
        return self.language.drafter_row(
            text, self.width, shared=method.shared_only, redistributed=method.redistributed
        )

    def draft_token(self, text: Letters) -> DraftToken:
        """After a text."""
        row = self.row(text)
        if self.method.keyed:
            token = self.noises.drafter.draw(row.ids, row.probabilities, self.key, len(text))
        else:
            token = int(row.ids[self.chooser.categorical(row.probabilities)])
        whose = Whose.TARGET if self.method.redistributed else Whose.DRAFTER
        return DraftToken(token, row if self.method.drafter_rows else None, whose)

    def letters_of(self, draft_token: DraftToken) -> Letters:
        """Its letters."""
        pair = self.language.pair
        return (pair.target if self.method.redistributed else pair.drafter).letters[draft_token.token]


# A target and a drafter in memory, which answer a session's commands at once.


class InMemory:
    """A target and a drafter of a made-up language; one object for each session."""

    def __init__(self, language: Language, noises: Noises, method: Method, width: int, seed: int) -> None:
        self._language, self._noises, self._method, self._width = language, noises, method, width
        self._key = NoiseKey(seed)
        self._guesser = Guesser(language, noises, method, width, self._key, RandomChooser(np.random.default_rng(seed)))
        self._committed = self._drafted = NOTHING
        self._nodes: list[Letters] = []

    def answer(self, command: Command) -> Event | None:
        """The event that a command leads to; None if it leads to none."""
        match command:
            case Open(lane):
                return Ready(lane)
            case Sent(lane, request):
                reply = self._reply(request)
                return None if reply is None else Replied(lane, reply)
        return None

    def draw(self, sent: Pass, drawn: Path) -> Sample:
        """The next token of a run that has drawn some."""
        if not drawn:
            (first,) = self._passed(sent).nodes
            assert isinstance(first, Sample)
            return first
        text = Letters(self._committed + self._language.pair.target.letters_of(drawn))
        return self._sample(self._language.target_row(text, self._width, NO_IDS), text)

    def _reply(self, request: Request_of_events) -> Reply_of_events | None:
        match request:
            case Draft():
                self._drafted = Letters(self._drafted[: request.offset] + request.letters)
                return Drafted(request.epoch, tuple(self._draft_tokens(request.count)), 0.0)
            case Pass():
                return self._passed(request)
            case FetchRow(number, node, listed):
                width = self._language.pair.target.size if listed is None else self._width
                row = self._language.target_row(self._nodes[node], width, NO_IDS if listed is None else listed)
                return RowFetched(number, node, row)
        return None

    def _draft_tokens(self, count: int) -> Iterator[DraftToken]:
        for _ in range(count):
            draft_token = self._guesser.draft_token(self._drafted)
            self._drafted = Letters(self._drafted + self._guesser.letters_of(draft_token))
            yield draft_token

    def _passed(self, sent: Pass) -> PassDone:
        letters_of = self._language.pair.target.letters_of
        self._committed = Letters(self._committed + letters_of(sent.committed))
        self._nodes = [Letters(self._committed + letters_of(path)) for path in sent.tree.paths()]
        texts = [self._nodes[node] for node in sent.answered]
        listed = sent.listed or (NO_IDS,) * len(texts)
        rows = [self._language.target_row(text, self._width, ids) for text, ids in zip(texts, listed, strict=True)]
        nodes: Iterable[Row | Sample] = map(self._sample, rows, texts) if sent.draws else rows
        return PassDone(sent.number, tuple(nodes), 0.0)

    def _sample(self, row: Row, text: Letters) -> Sample:
        return Sample(self._noises.target.draw(row.ids, row.probabilities, self._key, len(text)), 0.0)


# The same as services: what both know, and their sessions.


@dataclass(frozen=True, eq=False)
class World:
    """What both services know."""

    method: Method
    size: int
    seconds: float  # that a pass or a draft token takes
    language: Language
    noises: Noises

    @staticmethod
    def of(method: Method, size: int, seconds: float) -> "World":
        """The two vocabularies, and what is expected of texts."""
        target, drafter = (tokenization(size, side).vocabulary for side in Side)
        pair = Pair(target, target if method.same_vocabulary else drafter)
        return World(method, size, seconds, Language(pair, DISAGREEMENT), Noises.of(pair))

    def description(self, side: Side) -> Description:
        """Of the target or the drafter."""
        text = tokenizer_json(self.size, side.value)
        return Description(f"made-up {side.name.lower()}", text, (), (), self.size, CONTEXT, tokenizer_digest(text))


TargetReply = PassDone | RowFetched | PromptScored


@dataclass(frozen=True, eq=False)
class TargetService:
    """A target."""

    world: World
    description: Description

    async def open(self, request: OpenTarget, replies: Replies[TargetReply]) -> "TargetSession":
        """A new session."""
        world = self.world
        memory = InMemory(world.language, world.noises, world.method, WIDTH, seed=0)
        return TargetSession(memory, world.seconds, replies)

    async def close(self) -> None:
        """Nothing runs."""


@dataclass(eq=False)
class TargetSession:
    """One output."""

    memory: InMemory
    seconds: float
    replies: Replies[TargetReply]
    waiting: "asyncio.Queue[Pass | FetchRow]" = field(default_factory=asyncio.Queue)
    most: int = 0  # tokens that are wanted of the run under way
    task: "asyncio.Task[None]" = field(init=False)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self._answer_all())

    def receive(self, request: Pass | FetchRow | RunTo | ScorePrompt) -> None:
        """One reply for each request, in order; for a run one for each token, until a pass or a row is asked for."""
        if isinstance(request, RunTo):
            self.most = request.tokens
        elif isinstance(request, Pass | FetchRow):  # nobody asks for scores
            self.waiting.put_nowait(request)

    def left(self, reply: TargetReply) -> None:
        """Nothing waits for it."""

    def close(self) -> None:
        """Nothing is held."""
        self.task.cancel()

    async def _answer_all(self) -> None:
        while True:
            request = await self.waiting.get()
            if isinstance(request, Pass) and request.run > 1:
                await self._draw(request)
            else:
                await self._answer(request)

    async def _draw(self, request: Pass) -> None:
        drawn: Path = ()
        self.most, more = request.run, True
        while more:
            await asyncio.sleep(self.seconds)
            sample = self.memory.draw(request, drawn)
            drawn = (*drawn, sample.token)
            more = len(drawn) < self.most and self.waiting.empty()
            self.replies.send(PassDone(request.number, (sample,), self.seconds, more=more, first=len(drawn) - 1))

    async def _answer(self, request: Pass | FetchRow) -> None:
        if isinstance(request, Pass):
            await asyncio.sleep(self.seconds)
        event = self.memory.answer(Sent(0, request))
        assert isinstance(event, Replied)
        assert isinstance(event.reply, PassDone | RowFetched)
        self.replies.send(event.reply)


@dataclass(frozen=True, eq=False)
class DrafterService:
    """A drafter."""

    world: World
    description: Description

    async def open(self, request: OpenDrafter, replies: Replies[Drafted | Scored]) -> Conversation:
        """A new session."""
        world, chooser = self.world, RandomChooser(np.random.default_rng(0))
        guesser = Guesser(world.language, world.noises, world.method, WIDTH, NoiseKey(0), chooser)
        return Conversation(DrafterSession(guesser, world.seconds), replies)

    async def close(self) -> None:
        """Nothing runs."""


@dataclass(eq=False)
class DrafterSession:
    """One output that is guessed ahead of."""

    guesser: Guesser
    seconds: float
    text: Letters = NOTHING
    branches: dict[int, tuple[DraftToken, ...]] = field(default_factory=dict)  # those of the epoch, by number
    count: int = 0  # branches of the session
    packing: ReplyBuffer = field(init=False)
    growing: "deque[tuple[int, Branch]]" = field(
        init=False
    )  # with the number of draft tokens at which each is finished

    def close(self) -> None:
        """Nothing is held."""

    def begin(self, epoch: Epoch) -> None:
        """As in `conversation.Drafter`."""
        request = epoch.request
        self.text = Letters(self.text[: request.offset] + request.letters)
        self.packing, self.growing = ReplyBuffer(epoch), deque()
        adopted, self.branches = self.branches.get(request.adopt, ()), {}
        for draft_token in adopted:
            self._propose(draft_token)
        if adopted and not self.guesser.method.drafter_rows:  # the other side has them
            epoch.sent = len(adopted)
            self.packing = ReplyBuffer(epoch)

    def draft(self, epoch: Epoch, send: Send) -> "asyncio.Future[None]":
        """As in `conversation.Drafter`."""
        return asyncio.ensure_future(self._draft(epoch, send))

    async def _draft(self, epoch: Epoch, send: Send) -> None:
        self.packing.resume()
        while epoch.wanted:
            if self.packing.made < epoch.count:
                await asyncio.sleep(self.seconds)
                self._step(epoch)
            for reply in self.packing.due():
                send(reply)

    async def score(self, epoch: Epoch, request: Score) -> Scored:
        """There is no model."""
        raise ProtocolBroken("a made-up drafter has no scores")

    def _step(self, epoch: Epoch) -> None:
        """One more draft token; its branches are finished so many steps later as they have draft tokens."""
        before, draft_token = self.text, self.guesser.draft_token(self.text)
        for branch in self._prepared(epoch, before, draft_token):
            self.growing.append((self.packing.made + epoch.request.branch_depth, branch))
        self._propose(draft_token)
        while self.growing and self.growing[0][0] <= self.packing.made:
            self.packing.add_branch(self.growing.popleft()[1])

    def _propose(self, draft_token: DraftToken) -> None:
        self.text = Letters(self.text + self.guesser.letters_of(draft_token))
        self.packing.add(draft_token)

    def _prepared(self, epoch: Epoch, text: Letters, drawn: DraftToken) -> Iterator[Branch]:
        depth, width = epoch.request.branch_depth, epoch.request.branch_width
        if not depth:
            return
        row = self.guesser.row(text)
        for token in [int(one) for one in row.ids if one != drawn.token][:width]:
            letters = self.guesser.letters_of(DraftToken(token, None, drawn.whose))
            after, draft_tokens = Letters(text + letters), []
            for _ in range(depth):
                draft_tokens.append(self.guesser.draft_token(after))
                after = Letters(after + self.guesser.letters_of(draft_tokens[-1]))
            self.count += 1
            self.branches[self.count] = tuple(draft_tokens)
            yield Branch(self.count, len(text), letters, tuple(one.token for one in draft_tokens))


# Their processes.


@dataclass(frozen=True)
class MadeUp(Wanted):
    """A service to be started."""

    method: str = "slem"
    size: int = 128_000  # ids of each vocabulary
    milliseconds: float = 0.0

    def command(self) -> list[str]:
        """As it would be typed."""
        numbers = [self.method, str(self.size), str(self.milliseconds)]
        return [*self.prefix, sys.executable, "-m", "crossdraft.bench.made_up", self.role, *numbers]

    async def server(self) -> Serving:
        """The service itself, not yet started."""
        method, at_once = method_named(self.method), Listening(grace_seconds=0)
        world = World.of(method, self.size, self.milliseconds / 1000)
        if self.role == "target":
            return Server(TARGET, TargetService(world, world.description(Side.TARGET)), at_once)
        side = Side.TARGET if method.same_vocabulary else Side.DRAFTER
        return Server(DRAFTER, DrafterService(world, world.description(side)), at_once)


async def _main(role: str, method: str, size: int, milliseconds: float) -> None:
    await serve(await MadeUp(role, "", 1, method=method, size=size, milliseconds=milliseconds).server())


if __name__ == "__main__":
    Thread(target=end_with_stdin, daemon=True).start()
    run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
