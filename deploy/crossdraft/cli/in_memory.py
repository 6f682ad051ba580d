"""Services that a session needs, made up and answering at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from crossdraft.cli.invented import Language
from crossdraft.pipeline.events import Command, Event, Open, Ready, Replied, Reply, Request, Send
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import Chooser, RandomChooser
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    Pass,
    PassDone,
    RowFetched,
    Sample,
)
from crossdraft.verification.methods import Method
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import NO_IDS, Proposal, Row, Whose
from crossdraft.verification.trees import Path


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
    """What draws proposals of a made-up language."""

    language: Language
    noises: Noises
    method: Method
    width: int  # ids of a row
    key: NoiseKey
    chooser: Chooser

    def row(self, text: Letters) -> Row:
        """What a proposal after a text is drawn from."""
        method = self.method
        return self.language.drafter_row(
            text, self.width, shared=method.shared_only, redistributed=method.redistributed
        )

    def proposal(self, text: Letters) -> Proposal:
        """After a text."""
        row = self.row(text)
        if self.method.keyed:
            token = self.noises.drafter.draw(row.ids, row.probabilities, self.key, len(text))
        else:
            token = int(row.ids[self.chooser.categorical(row.probabilities)])
        whose = Whose.TARGET if self.method.redistributed else Whose.DRAFTER
        return Proposal(token, row if self.method.drafter_rows else None, whose)

    def letters_of(self, proposal: Proposal) -> Letters:
        """Its letters."""
        pair = self.language.pair
        return (pair.target if self.method.redistributed else pair.drafter).letters[proposal.token]


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
            case Send(lane, request):
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

    def _reply(self, request: Request) -> Reply | None:
        match request:
            case Draft():
                self._drafted = Letters(self._drafted[: request.offset] + request.letters)
                return Drafted(request.epoch, tuple(self._proposals(request.count)), 0.0)
            case Pass():
                return self._passed(request)
            case FetchRow(number, node, listed):
                width = self._language.pair.target.size if listed is None else self._width
                row = self._language.target_row(self._nodes[node], width, NO_IDS if listed is None else listed)
                return RowFetched(number, node, row)
        return None

    def _proposals(self, count: int) -> Iterator[Proposal]:
        for _ in range(count):
            proposal = self._guesser.proposal(self._drafted)
            self._drafted = Letters(self._drafted + self._guesser.letters_of(proposal))
            yield proposal

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
