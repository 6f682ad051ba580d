"""Services that a session needs, made up and answering at once."""

from dataclasses import dataclass

import numpy as np

from crossdraft.cli.invented import Language
from crossdraft.pipeline.events import Command, Event, Open, Ready, Replied, Reply, Request, Send
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import RandomChooser
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


@dataclass(frozen=True, eq=False)
class Noises:
    """The keyed noise of both vocabularies, which `seeded` draws with."""

    target: KeyedNoise
    drafter: KeyedNoise

    @staticmethod
    def of(pair: Pair) -> "Noises":
        return Noises(KeyedNoise.of(pair.target), KeyedNoise.of(pair.drafter))


class InMemory:
    """A target and a drafter of a made-up language; one object for each session."""

    def __init__(self, language: Language, noises: Noises, method: Method, width: int, seed: int) -> None:
        self._language, self._noises, self._method, self._width = language, noises, method, width
        self._rng = np.random.default_rng(seed)
        self._chooser = RandomChooser(self._rng)
        self._key = NoiseKey(seed)
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

    def _reply(self, request: Request) -> Reply | None:
        match request:
            case Draft():
                self._drafted = Letters(self._drafted[: request.offset] + request.letters)
                return Drafted(request.epoch, tuple(self._proposal() for _ in range(request.count)), 0.0)
            case Pass():
                return self._passed(request)
            case FetchRow(number, node, listed):
                width = self._language.pair.target.size if listed is None else self._width
                row = self._language.target_row(self._nodes[node], width, NO_IDS if listed is None else listed)
                return RowFetched(number, node, row)
        return None

    def _proposal(self) -> Proposal:
        method, pair = self._method, self._language.pair
        row = self._language.drafter_row(
            self._drafted, self._width, shared=method.shared_only, redistributed=method.redistributed
        )
        if method.keyed:
            token = self._noises.drafter.draw(row.ids, row.probabilities, self._key, len(self._drafted))
        else:
            token = int(row.ids[self._chooser.categorical(row.probabilities)])
        whose = Whose.TARGET if method.redistributed else Whose.DRAFTER
        vocabulary = pair.target if method.redistributed else pair.drafter
        self._drafted = Letters(self._drafted + vocabulary.letters[token])
        return Proposal(token, row if method.drafter_rows else None, whose)

    def _passed(self, sent: Pass) -> PassDone:
        letters_of = self._language.pair.target.letters_of
        self._committed = Letters(self._committed + letters_of(sent.committed))
        self._nodes = [Letters(self._committed + letters_of(path)) for path in sent.tree.paths()]
        texts = [self._nodes[node] for node in sent.answered]
        listed = sent.listed or (NO_IDS,) * len(texts)
        rows = [self._language.target_row(text, self._width, ids) for text, ids in zip(texts, listed, strict=True)]
        return PassDone(sent.number, tuple(map(self._sample, rows, texts)), 0.0)

    def _sample(self, row: Row, text: Letters) -> Row | Sample:
        if not self._method.samples:
            return row
        return Sample(self._noises.target.draw(row.ids, row.probabilities, self._key, len(text)), 0.0)
