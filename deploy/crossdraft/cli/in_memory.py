"""Services that a session needs, made up and answering at once."""

from dataclasses import dataclass

import numpy as np

from crossdraft.cli.invented import Language
from crossdraft.pipeline.events import Command, DrafterOpened, Event, TargetOpened
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
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
            case OpenTarget():
                return TargetOpened()
            case OpenDrafter():
                return DrafterOpened()
            case Draft():
                self._drafted = Letters(self._drafted[: command.offset] + command.letters)
                return Drafted(command.epoch, tuple(self._proposal() for _ in range(command.count)), 0.0)
            case Pass():
                return self._passed(command)
            case FetchRow(number, node):
                return RowFetched(
                    number, node, self._language.target_row(self._nodes[node], self._language.pair.target.size, NO_IDS)
                )
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
        listed = sent.listed or (NO_IDS,) * len(self._nodes)
        rows = [
            self._language.target_row(text, self._width, ids) for text, ids in zip(self._nodes, listed, strict=True)
        ]
        return PassDone(sent.number, tuple(map(self._sample, rows, self._nodes)), 0.0)

    def _sample(self, row: Row, text: Letters) -> Row | Sample:
        if not self._method.samples:
            return row
        return Sample(self._noises.target.draw(row.ids, row.probabilities, self._key, len(text)), 0.0)
