"""What is kept of an output so that another orchestrator can go on with it. Pure."""

from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from crossdraft.pipeline import Kind
from crossdraft.rpc.errors import Unreachable
from crossdraft.serving.orders import Ended, Order
from crossdraft.verification.methods import SEEDED, method_named

SEED_BYTES = 8
ANOTHER_MODEL = "{!r} was replaced by another model while this output was being made; ask again"


@dataclass
class Journal:
    """What a client has been given of one output: enough for another orchestrator to go on from there."""

    order: Order
    delivered: list[int] = field(default_factory=list)  # ids
    target: str = ""  # what the targets ran that made them
    kinds: Counter[Kind] = field(default_factory=Counter)  # of the tokens
    resumed: bool = False  # more than one orchestrator has worked on it
    lost_at: float | None = None  # when the latest orchestrator was heard of last, until another one makes a token
    given_up: float = 0.0  # when it was given up, where `lost_at` is not None

    @property
    def rest(self) -> Order:
        """The order for what is missing."""
        request = self.order.request
        committed = (*request.committed, *self.delivered)
        return replace(self.order, request=replace(request, committed=committed))

    def whole(self, ended: Ended) -> Ended:
        """The end, with all tokens counted; what an orchestrator that was lost has cost is not known."""
        if not self.resumed:
            return ended
        accepted, corrected, bonus = (self.kinds[kind] for kind in (Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS))
        tokens = len(self.delivered)
        figures = replace(ended.statistics, tokens=tokens, accepted=accepted, corrected=corrected, bonus=bonus)
        return replace(ended, statistics=figures)

    def took_up(self, target: str) -> None:
        """An orchestrator goes on, with targets that run this; raises Unreachable if it is not the same model."""
        if self.delivered and target != self.target:
            raise Unreachable(ANOTHER_MODEL.format(self.order.model))
        self.target = target


def resumable(order: Order) -> Order:
    """The same order with its chance resolved, so that whoever goes on with it makes the same text.

    Where no method is named and the output is not greedy, the method is `seeded`: what began with `coupled` and is
    resumed has not the target's law, as the moment of a loss depends on what was being decided then. Where no seed is
    named it comes from the order's id, so that a client that asks again with the same id gets the same text, whatever
    has been lost since.
    """
    request = order.request
    if request.greedy or not (request.method is None or method_named(request.method).seedable):
        return order
    seed = seed_of(order.id) if request.seed is None else request.seed
    return replace(order, request=replace(request, method=request.method or SEEDED.name, seed=seed))


def seed_of(id: str) -> int:
    """A seed from a request's id, by a hash with a key of its own, 64 bits."""
    return int.from_bytes(blake2b(id.encode(), digest_size=SEED_BYTES, key=b"crossdraft seed").digest(), "big")


def exact_after_loss(order: Order) -> bool:
    """Whether the rest of an output may be made by another orchestrator without changing its law."""
    return order.request.greedy or order.request.seed is not None
