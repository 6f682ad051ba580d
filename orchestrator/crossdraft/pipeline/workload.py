"""What a generation's speed depends on: the numbers that the simulator and the forecast work with."""

from dataclasses import dataclass, replace
from typing import Self

from crossdraft.pipeline.governing import Choice

FURTHER = 0.75  # of the refusals that a branch missed, what one more branch misses too


@dataclass(frozen=True)
class Workload:
    """Costs and agreement of one pair of services for one kind of text.

    Raises:
        ValueError: a probability is not between 0 and 1, or a cost is below 0.
    """

    acceptance: tuple[float, ...]  # by place in the epoch, given that all before held; the last: all later places
    match: float  # probability that a token which the target drew by itself agrees with the draft
    token: float  # seconds of a drafter's forward for one proposal; infinite: it never answers
    pass_base: float  # seconds of a plain pass in the target (A)
    pass_node: float = 0.0  # ... more for each node of its tree (B)
    slope: float = 0.0  # what a further token in a drafter's forward costs, as a share of `token`
    drafter_trip: float = 0.0  # seconds of a round trip
    target_trip: float = 0.0
    branch_hit: float = 0.0  # probability that the one likeliest branch is what replaces a refused proposal
    tokens_per_proposal: float = 1.0  # target tokens that an accepted proposal is worth
    nodes_per_proposal: float = 1.0  # of a pass's tree
    samples: bool = False  # the target draws by itself, and what it drew is compared (`slem`, `seeded`)
    targets: int = 1
    plain: float = 0.0  # seconds of a token in plain decoding, all included; 0: as a pass over no proposals
    contention: float = 1.0  # how many times as long a pass takes while the drafter runs forwards

    def __post_init__(self) -> None:
        shares = (*self.acceptance, self.match, self.branch_hit)
        if not self.acceptance or not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"acceptance, match and branch_hit must be between 0 and 1, got {shares}")
        costs = (self.token, self.pass_node, self.slope, self.drafter_trip, self.target_trip)
        if min(costs) < 0 or self.pass_base <= 0 or self.tokens_per_proposal <= 0 or self.targets < 1:
            raise ValueError(f"costs must be 0 or more, and a pass must cost something, got {self}")
        if self.plain < 0 or self.contention < 1:
            raise ValueError(f"plain must be 0 or more and contention 1 or more, got {self.plain}, {self.contention}")

    def accepted(self, place: int) -> float:
        """Probability that the proposal at this place of its epoch holds, given that all before it did."""
        return self.acceptance[place] if place < len(self.acceptance) else self.acceptance[-1]

    def forward(self, choice: Choice) -> float:
        """Seconds of a drafter's forward, the branches that it draws along included."""
        branches = choice.branch_width * choice.branch_depth if choice.overlap else 0
        return self.token * (1 + self.slope * branches)

    def pass_seconds(self, proposals: float) -> float:
        """From sending a pass over so many proposals to its answer."""
        return self.target_trip + self.pass_base + self.pass_node * self.nodes_per_proposal * proposals

    @property
    def plain_seconds(self) -> float:
        """From sending a pass of plain decoding to its answer."""
        return self.plain or self.pass_seconds(0)

    @property
    def slowed(self) -> float:
        """Share of a pass's time that is lost to the drafter while it runs forwards."""
        return 1 - 1 / self.contention

    def hit(self, width: int) -> float:
        """Probability that one of the `width` likeliest branches is what replaces a refused proposal."""
        return 1 - (1 - self.branch_hit) * FURTHER ** (width - 1) if self.branch_hit else 0.0

    @property
    def proposals_per_token(self) -> int:
        """Proposals that must arrive until the draft has caught up with a token that the target drew by itself."""
        return max(1, round(1 / self.tokens_per_proposal))

    def with_samples(self) -> Self:
        """The same for a method whose target draws by itself: agreement is the same whenever it is compared."""
        return replace(self, samples=True)
