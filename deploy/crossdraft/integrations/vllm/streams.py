"""One request's draft: a stream of letters that goes on while the target's steps run.

What the target emits is compared with the stream as text. While they agree, everything that the drafter has said beyond
the target's newest token is at hand, whenever it came; when they differ, the drafter is rewound, and what it had said
is worth nothing. All this is without I/O: requests to the drafter are returned, to be sent in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdraft.session.drafter_side import Drafts, of_branch
from crossdraft.session.epoch import Epoch
from crossdraft.speculation.choice import PLAIN, DraftSeen
from crossdraft.speculation.estimates import Share
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import encode_beginning
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Advance, Draft, Drafted
from crossdraft.types.rows import Whose
from crossdraft.types.trees import Path

MEMORY = 50.0  # tokens after which a judged guess weighs 1/e: a request's text changes within a few lines
MAX_BEHIND = 3  # steps of the target that a draft may be behind its text before it is begun anew

Encode = Callable[[Letters], Path]  # text in mid-output to target ids; raises NotExpressible


class DrafterFaultError(Exception):
    """A drafter sent what it was not asked for; the text says what."""


@dataclass(frozen=True)
class Guess:
    """The target tokens that a draft says will come next."""

    ids: Path = ()
    sure: int = 0  # of them, after which the draft goes on: more text could change only those behind


@dataclass(frozen=True)
class Outcome:
    """How a guess fared, whether it was proposed or not.

    The target's own token equals a guess as often as that would be accepted: a drafter is judged without being used.
    """

    matched: int  # tokens of the guess, from its first one on
    missed: bool  # the next one differs
    edge: bool | None = None  # whether the first token behind `Guess.sure` matched; None: it was not reached


@dataclass(frozen=True)
class Pull:
    """How much is asked of the drafter."""

    window: int  # draft tokens beyond the target's newest token, 1 to MOST_DRAFT_TOKENS
    first: int  # of them in the first reply of an epoch
    chunk: int  # in the others
    branch: int = 0  # draft tokens of a prepared continuation for each; 0: none are prepared


class DraftStream:
    """The text of one request since the drafter was told its context, and the draft that goes on from there."""

    def __init__(self, pair: Pair, encode: Encode) -> None:
        self.share = Share(memory=MEMORY)  # of guessed tokens of this request that matched
        self._pair = pair
        self._encode = encode
        self._text = NOTHING  # since the session was opened
        self._drafts = Drafts(pair)
        self._epoch: Epoch | None = None  # None: nothing is being drafted
        self._behind = 0  # steps since the draft was last beyond the text
        self._branch = 0  # draft tokens of each prepared continuation of the epoch
        self._guess = Guess()  # at the latest step
        self._ahead: Guess | None = None  # all of the draft at hand beyond the text; None: not yet known

    @property
    def asked(self) -> float | None:
        """Since when the first draft tokens of an epoch are under way, in seconds; None: they are not."""
        draft = self._drafts.ledger.draft
        return None if self._epoch is None or draft is None or draft.replies else draft.at

    def emitted(self, ids: Sequence[int]) -> Outcome:
        """The target has emitted these ids; how the guess of the step before fared."""
        guess, self._guess = self._guess, Guess()
        self._ahead = _behind(self._ahead, ids)
        self._text = Letters(self._text + self._pair.target.letters_of(ids))
        judged = min(len(guess.ids), len(ids))
        matched = next((place for place in range(judged) if guess.ids[place] != ids[place]), judged)
        missed = matched < judged
        self.share.add(float(matched), matched + missed)
        edge = matched > guess.sure if min(judged, matched + missed) > guess.sure else None
        return Outcome(min(matched, guess.sure), missed and matched < guess.sure, edge)

    def follow(self, pull: Pull, now: float) -> Sequence[Draft | Advance]:
        """What the drafter is to be told, so that it goes on from the text as it is `now`, in seconds."""
        epoch = self._epoch
        if epoch is None or epoch.contradicts(self._text) or self._lags(epoch):
            return [self._begin(pull, now)]
        most = self._drafts.ledger.wanted + MOST_DRAFT_TOKENS
        return self._drafts.advance(min(epoch.passed(len(self._text)) + pull.window, most), pull.chunk, now)

    def stop(self, now: float) -> Sequence[Draft | Advance]:
        """Nothing more is wanted for now."""
        self._epoch = None
        return self._drafts.stop(now)

    def take(self, reply: Drafted, now: float) -> DraftSeen | None:
        """A reply came; None if its epoch is over. Raises DrafterFaultError: nothing of the kind was asked for."""
        epoch = self._epoch
        if epoch is None or reply.epoch != epoch.number:
            return None
        if fault := self._fault_of(reply):
            raise DrafterFaultError(fault)
        seen = self._drafts.take(reply, epoch, now)
        self._ahead = self._encoded(epoch)  # here, where the target does not wait for it
        return seen

    def guess(self, most: int) -> Guess:
        """The target tokens that come next by the draft at hand, at most so many."""
        if self._epoch is None:
            return Guess()
        if self._ahead is None:
            self._ahead = self._encoded(self._epoch)
        self._guess = Guess(self._ahead.ids[:most], min(most, self._ahead.sure))
        return self._guess

    def _encoded(self, epoch: Epoch) -> Guess:
        """All that the draft says beyond the text, in target tokens."""
        if epoch.contradicts(self._text):
            return Guess()
        ids = encode_beginning(self._encode, Letters(epoch.drafted[len(self._text) - epoch.start :]))
        # A draft token that ends the text says itself where it ends.
        return Guess(ids, len(ids) if self._drafts.ledger.aside else max(0, len(ids) - 1))

    def _begin(self, pull: Pull, now: float) -> Draft:
        """A new epoch at the end of the text, or with the prepared continuation that agrees with it."""
        drafts, text = self._drafts, self._text
        branch = None if self._epoch is None else drafts.branches.match(self._epoch, text, letters_decide=True)
        here = len(text) if branch is None else branch.offset + len(branch.letters)
        self._epoch = Epoch(drafts.ledger.epoch + 1, PLAIN, self._pair, here, len(text))
        self._epoch.extend(() if branch is None else of_branch(branch))
        adopted = len(self._epoch.draft_tokens)
        self._behind, self._branch, self._ahead = 0, pull.branch, None
        count = min(MOST_DRAFT_TOKENS, adopted + pull.window)
        first = min(adopted + pull.first, count)
        return drafts.begin(self._epoch, text, branch, count, first, now, chunk=pull.chunk, branch_depth=pull.branch)

    def _lags(self, epoch: Epoch) -> bool:
        """Whether the draft has been behind the text for long, and not because its first reply is still under way."""
        behind = epoch.start + len(epoch.drafted) <= len(self._text)
        self._behind = self._behind + 1 if behind and self.asked is None else 0
        return self._behind > MAX_BEHIND

    def _fault_of(self, reply: Drafted) -> str:
        """What is wrong with a reply of the epoch; empty if nothing is."""
        ledger, size = self._drafts.ledger, self._pair.drafter.size
        if reply.first != ledger.received or reply.first + len(reply.draft_tokens) > ledger.wanted:
            return (
                f"it sent draft tokens {reply.first} to {reply.first + len(reply.draft_tokens)}, asked for "
                f"{ledger.received} to {ledger.wanted}"
            )
        for token in reply.draft_tokens:
            if token.whose is not Whose.DRAFTER or not 0 <= token.token < size:
                return f"it proposed id {token.token}, and its ids are 0 to {size - 1}"
        return self._drafts.fault_of(reply, self._branch, ledger.wanted)


def _behind(guess: Guess | None, ids: Sequence[int]) -> Guess | None:
    """What is left of a guess after these ids; None if they are not its first ones, though their text may be."""
    count = len(ids)
    if guess is None or guess.ids[:count] != tuple(ids):
        return None
    return Guess(guess.ids[count:], max(0, guess.sure - count))
