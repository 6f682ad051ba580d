"""What a governor knows of its services and of how well they agree."""

from dataclasses import dataclass

from crossdraft.pipeline.workload import Workload

FIRST_TRY = 4.0  # plain passes that getting to know a drafter may lose
PLACES = (0, 1, 2, 3, 4, 6, 9, 14)  # where ranges of places in an epoch begin that have an acceptance in common
BRANCH_COST = 0.17  # of a further token in a drafter's forward, as a share: a batch of 8 measured 2.1 to 2.6 times one


@dataclass(frozen=True)
class Estimates:
    """Plain numbers: what is believed, and how much it rests on."""

    acceptance: tuple[float, ...] = (0.6,) * len(PLACES)  # for the ranges of `PLACES`
    match: float = 0.45  # of a token that the target drew by itself with the draft
    token: float = 0.0  # seconds of a drafter's forward
    slope: float = BRANCH_COST
    drafter_trip: float = 0.0  # seconds
    pass_base: float = 0.0  # seconds in the target, its queue included
    pass_node: float = 0.0  # ... more for each proposal that it and the passes beside it cover, whatever their trees
    target_trip: float = 0.0  # seconds
    branch_hit: float = 0.5
    tokens_per_proposal: float = 1.0
    judged: float = 0.0  # proposals, with forgetting
    compared: float = 0.0  # ... with tokens that the target had drawn by itself
    replies: int = 0  # of the drafter
    passes: int = 0
    tried: float = 0.0  # refusals that met branches, with forgetting
    plain: float = 0.0  # seconds of a token in plain decoding, whose runs go on without a round trip
    plain_passes: int = 0  # ... that were seen; 0: `plain` is guessed from other passes
    slowed: float = 0.0  # seconds that a pass loses for each one in which the drafter works meanwhile
    allowance: float = FIRST_TRY  # plain passes that trying a drafter may still lose
    sessions: float = 1.0  # that share the target, this one included
    queue: float = 0.0  # seconds of a pass's queue
    trial_at: float = 0.0  # seconds of the session's clock: when a drafter that was put aside is tried next
    interval: float = 0.0  # seconds between its trials now

    @property
    def known(self) -> bool:
        """Whether both services have been seen at work."""
        return self.replies > 0 and self.passes > 0

    def workload(self, samples: bool = False, targets: int = 1) -> Workload:
        """The numbers that forecasts start from. Raises ValueError before both services have been seen at work."""
        ends = (*PLACES[1:], PLACES[-1] + 1)
        by_place = tuple(
            share for begin, end, share in zip(PLACES, ends, self.acceptance, strict=True) for _ in range(end - begin)
        )
        return Workload(
            by_place,
            self.match,
            self.token,
            self.pass_base,
            self.pass_node,
            self.slope,
            self.drafter_trip,
            self.target_trip,
            self.branch_hit,
            self.tokens_per_proposal,
            samples=samples,
            targets=targets,
            plain=self.plain,
            contention=1 / (1 - self.slowed),
        )
