"""What a message may hold at most: checked before anything is made of it, as a few bytes can ask for much."""

from crossdraft.rpc.errors import BadMessage
from crossdraft.verification.exchange import MOST_PROPOSALS

MOST_IDS = 1 << 22  # of one list: no context is longer
MOST_NUMBERS = 1 << 23  # of one bit field, which may need a bit each and becomes eight bytes each
MOST_NODES = 17 * MOST_PROPOSALS  # of a pass's tree: sixteen paths, and some
WIDEST_HEAD = 4096  # ids of a target's row that travel unasked
WIDEST_ROW = 1 << 16  # ids of a drafter's row
MOST_BIASES = 1 << 16  # of a request's logit_bias
MOST_STRINGS = 4096  # of one question for scores
LONGEST_STRING = 1 << 16  # letters of each of them
MOST_BRANCHES = MOST_PROPOSALS * MOST_PROPOSALS  # in one reply


def check_most(count: int, most: int, name: str) -> None:
    """Raises BadMessage if there is more than there may be."""
    if count > most:
        raise BadMessage(f"{name} has {count}; at most {most} are taken")
