"""A tail that turns out to be nothing: what a head left over was rounding."""

from collections.abc import Callable

import numpy as np
import pytest

from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification import coupling, rejection
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedRow, Refused, Walk, WalkStep
from tests.verification.toys import as_ids
from tests.vocabularies import pair_of

PAIR = pair_of(("a", "b"), ("a", "b"))
HEAD = Row(as_ids(0), np.zeros(1), 1.0)  # at 0 so that the tail is drawn
WHOLE = Row(as_ids(0), np.ones(1))


@pytest.mark.parametrize("walk", [rejection.walk, coupling.walk])
@pytest.mark.parametrize("draft_token", [DraftToken(0, Row.certain(0)), None], ids=["refused", "none"])
def test_the_whole_row_is_drawn_from(walk: Callable[[Ground], Walk], draft_token: DraftToken | None) -> None:
    walking = walk(Ground(PAIR, RandomChooser(np.random.default_rng(0))))
    step: WalkStep = next(walking)
    while not isinstance(step, Emit | Refused):
        match step:
            case NeedDraftToken():
                step = walking.send(draft_token)
            case NeedRow():
                step = walking.send(WHOLE if step.whole else HEAD)
    assert step == Emit(0, Kind.BONUS if draft_token is None else Kind.CORRECTED)
