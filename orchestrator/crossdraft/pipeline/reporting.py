"""How drafts fare: told to the governor as it shows, and counted when an epoch is over."""

from crossdraft.pipeline.branches import Branches
from crossdraft.pipeline.epoch import Epoch, Verdict
from crossdraft.pipeline.events import Counts
from crossdraft.pipeline.fetched import Flight
from crossdraft.pipeline.governing import BranchSeen, Governor, Judged, PassSeen
from crossdraft.text.letters import Letters
from crossdraft.verification.exchange import Branch, PassDone
from crossdraft.verification.walk import Kind


def pass_seen(flight: Flight, done: PassDone, now: float) -> PassSeen:
    """What the governor is told of a pass that is back, or of tokens of a run."""
    own = 1 + len(flight.sent.tree)
    others = (max(0, done.fed - own) if done.fed else done.shared - 1) if done.shared > 1 else 0
    return PassSeen(
        flight.tokens,
        now - flight.left_at,
        done.seconds,
        flight.idle,
        flight.proposals,
        done.queued,
        done.forwards,
        not flight.drawn,
        done.shared,
        others,
    )


class Reporting:
    """What the governor knows of the running epoch so far."""

    def __init__(self, governor: Governor, counts: Counts) -> None:
        self._governor = governor
        self._counts = counts
        self._verdict = Verdict()
        self._tokens = 0
        self._bonus = 0

    def progress(self, epoch: Epoch, text: Letters, now: float) -> None:
        """Tell how far the draft has held since the last time, if anything is new."""
        before, tokens, settled = self._verdict, self._tokens, self._bonus
        verdict = self._remember(epoch.verdict(text))
        if verdict == before and tokens == self._tokens:
            return
        accepted, refused = verdict.accepted - before.accepted, verdict.refused and not before.refused
        emitted, bonus = self._tokens - tokens, self._bonus - settled
        self._governor.observe(Judged(before.accepted, accepted, refused, emitted, bonus, epoch.settled), now)
        epoch.settled = epoch.settled and not accepted

    def over(self, epoch: Epoch, text: Letters) -> None:
        """The epoch is over: count it, and begin anew."""
        verdict = epoch.verdict(text)
        self._counts.round(len(epoch.proposals), verdict.accepted, verdict.refused)
        self._remember(Verdict())

    def continued(self, branches: Branches, epoch: Epoch, text: Letters, samples: bool, now: float) -> Branch | None:
        """The prepared continuation that goes on from here, if the draft was refused and one does; counted and told."""
        if not len(branches) or not epoch.verdict(text).refused:
            return None
        branch = branches.match(epoch, text, samples)
        self._counts.branches_tried += 1
        self._counts.branches_hit += branch is not None
        self._governor.observe(BranchSeen(branch is not None), now)
        return branch

    def _remember(self, verdict: Verdict) -> Verdict:
        self._verdict = verdict
        self._tokens, self._bonus = self._counts.tokens, self._counts.kinds[Kind.BONUS]
        return verdict
