"""Prepared continuations: what an epoch drafts besides, in case that one of its proposals is refused.

A branch begins with a *key*, a token that was likely at a proposal's place but was not drawn. Which ids are
likely is known from the drafter's rows and noise alone, and the branch's own proposals are drawn like any others, so
that preparing them changes no law. Keys are text: after a control symbol there is little to continue.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crossdraft.drafter.context import Context
from crossdraft.drafter.growth import Tip
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import Letters, is_plain
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import Branch, Draft
from crossdraft.verification.rows import Proposal

SPARE = 3  # candidates beyond a proposal's branches, for those that cannot be keys
TREE = 128  # nodes of one tree, about: each costs some microseconds a step


@dataclass(frozen=True)
class Shape:
    """How many branches, and how long."""

    depth: int  # proposals of each; 0: there are none
    width: int  # branches for each proposal

    @property
    def candidates(self) -> int:
        """Ids that may be keys; all of them are looked at for the best `width`."""
        return self.width + SPARE if self.depth else 0

    @property
    def cluster(self) -> int:
        """Nodes of one proposal and its branches."""
        return 1 + self.width * self.depth

    @property
    def least(self) -> int:
        """Proposals whose branches may be unfinished, and one."""
        return self.depth + 2

    @property
    def kept(self) -> int:
        """Newest proposals that stay in the tree, with their branches, when it has grown too large."""
        return max(self.least, TREE // (2 * self.cluster))

    @property
    def room(self) -> int:
        """Tokens that the model must see besides the text."""
        return self.least * self.cluster if self.depth else 0

    def fits(self, capacity: int) -> bool:
        """Whether a quarter of a context of `capacity` tokens is left for text."""
        return 4 * self.room <= 3 * capacity


@dataclass
class Growing:
    """A branch: where it begins, and how far it has come."""

    offset: int  # letters since the start of the output: where the proposal that it replaces begins
    key: int  # the drafter's id
    letters: Letters  # of the key
    tip: Tip
    end: int = field(init=False)  # letters since the start of the output: where it has come to
    proposals: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.offset + len(self.letters)


class Prepared:
    """The finished branches of a session's latest epoch, by their numbers."""

    def __init__(self) -> None:
        self._number = 0
        self._branches: dict[int, Growing] = {}

    def finish(self, growing: Growing) -> Branch:
        """A branch that has its proposals, as it is sent."""
        self._number += 1
        self._branches[self._number] = growing
        tokens = tuple(proposal.token for proposal in growing.proposals)
        return Branch(self._number, growing.offset, growing.letters, tokens)

    def release(self, frontier: int) -> None:
        """The output has at least so many letters: the oldest branches that say fewer can never go on from it."""
        while self._branches and next(iter(self._branches.values())).end < frontier:
            del self._branches[next(iter(self._branches))]

    def begin(self, request: Draft, context: Context) -> Growing | None:
        """A new epoch begins: the branch that it adopts, if any; all are forgotten.

        Raises:
            ProtocolBroken: there is no such branch (any more), or the text is not its.
        """
        adopted = self._branches.get(request.adopt)
        self._branches = {}
        if not request.adopt:
            return None
        if adopted is None:
            raise ProtocolBroken(f"branch {request.adopt} is not one of the latest epoch's")
        first = min(adopted.offset, request.offset)
        if context.letters(first, adopted.offset) + adopted.letters != (
            context.letters(first, request.offset) + request.letters
        ):
            raise ProtocolBroken(f"branch {request.adopt} does not begin with the text of epoch {request.epoch}")
        return adopted


def keys(candidates: Iterable[int], drawn: int, vocabulary: Vocabulary) -> Iterator[int]:
    """Those candidates, the most likely first, that are text, and each another than those before and what was drawn."""
    known = {vocabulary.letters[drawn]}
    for token in candidates:
        letters = vocabulary.letters[token]
        if letters not in known and is_plain(letters):
            known.add(letters)
            yield token
