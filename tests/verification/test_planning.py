"""What a pass is sent over: the guesses of each method, the room for them, and what its rows must list."""

from typing import Any

import pytest

from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.trees import Path, tree_of
from crossdraft.verification.methods import COUPLED_SHARED, SLEM, SLRS, TLI, TOKENTIMING, Method
from crossdraft.verification.planning import Plan, Planner
from tests.tables import pair_of
from tests.verification.toys import row_of

PAIR = pair_of(("a", "b", "ab", "a"), ("ab", "a", "b", "ba"))
ROWS = row_of([0, 1, 3], [2, 1, 1]), row_of([1, 2], [1, 3]), Row.certain(3), Row.certain(1)
DRAFT = [DraftToken(token, row) for token, row in zip((0, 2, 3, 1), ROWS, strict=True)]  # ab, b, ba, a
LETTERS = (0, 1, 1, 1, 0, 0)  # the same as the target's tokenizer has it


def planned(method: Method, budget: int = 16, paths: int = 2, **asked: Any) -> Plan:
    asked = {"draft_tokens": DRAFT, "skip": 0, "room": 16} | asked
    encode = lambda letters: tuple(map("ab".index, letters))  # noqa: E731
    return Planner(PAIR, method, encode, budget, paths).plan(**asked)


BESIDE = [Letters("ba"), Letters("aa")]


@pytest.mark.parametrize(
    ("method", "asked", "paths", "own"),
    [
        (TLI, {}, [(2, 1)], (2, 1)),  # up to a token that the target has not
        (TLI, {"skip": 2}, [(1,)], (1,)),
        (TLI, {"skip": 1}, [], ()),  # in the middle of a draft token no other one begins
        (SLEM, {}, [LETTERS, (2, 1)], ()),
        (SLEM, {"skip": 1}, [LETTERS[1:]], ()),
        (SLEM, {"skip": 1, "paths": 1}, [LETTERS[1:]], ()),
        (SLEM, {"paths": 1}, [LETTERS], ()),
        (COUPLED_SHARED, {}, [(2, 1), LETTERS], (2, 1)),
        (SLRS, {}, [(2, 1, 1, 0, 0)], ()),
        (TOKENTIMING, {}, [LETTERS], ()),
        (TLI, {"alternatives": BESIDE}, [(2, 1), (1, 0)], (2, 1)),
        (TLI, {"alternatives": BESIDE, "paths": 1}, [(2, 1)], (2, 1)),
        (SLEM, {"alternatives": BESIDE}, [LETTERS, (2, 1)], ()),
        (SLEM, {"alternatives": BESIDE, "nodes": 16}, [LETTERS, (2, 1), (1, 0), (0, 0)], ()),
        (TLI, {"room": 1}, [(2,)], (2,)),
        (TLI, {"budget": 1}, [(2,)], (2,)),
        (TLI, {"room": -1}, [], ()),
        (SLEM, {"nodes": 3, "budget": 99}, [LETTERS[:3]], ()),
        (SLEM, {"nodes": 99, "room": 7}, [LETTERS, (2,)], ()),
    ],
)
def test_the_paths_of_a_pass(method: Method, asked: dict[str, Any], paths: list[Path], own: Path) -> None:
    plan = planned(method, **asked)
    assert (plan.tree, plan.own) == (tree_of(paths, 99), own)
    assert len(plan.listed) == (0 if method.samples else 1 + len(plan.tree))


@pytest.mark.parametrize(("chance", "likelier"), [(0.5, (0,)), (0.6, (2, 0))])
def test_beside_each_judged_draft_token_are_others_by_the_chance_that_they_replace_it(chance, likelier):
    """Of the first row "a" has 0.4, and the second one is reached by √0.6: there a chance above 0.4 / √0.6 is more."""
    rows = row_of([0, 1], [0.6, 0.4]), row_of([1, 2, 3], [chance, 0.9 - chance, 0.1])  # "ba" is no target token
    draft = [DraftToken(token, row) for token, row in zip((0, 2), rows, strict=True)]
    asked = {"draft_tokens": draft, "nodes": 3}
    assert planned(TLI, **asked).tree == tree_of([(2, 1), likelier], 99)
    assert planned(TLI, **asked | {"nodes": 9}).tree.paths()[3:] == [likelier, *({(0,), (2, 0)} - {likelier})]
    theirs = [DraftToken(2, row_of([1, 2], [1, 3]), Whose.TARGET), DraftToken(1, None, Whose.TARGET)]
    assert planned(TLI, nodes=9, draft_tokens=theirs).tree == tree_of([(2, 1), (1,)], 99)


def test_a_row_lists_what_the_draft_token_there_could_have_been_or_what_follows_in_the_tree() -> None:
    """By letters: "a" is two of the target's ids."""
    listed = {method.name: [ids.tolist() for ids in planned(method).listed] for method in (TLI, SLRS)}
    assert listed == {"tli": [[2, 0], [0, 1], []], "slrs": [[2], [1], [1], [0, 3], [0, 3], []]}
    assert [ids.tolist() for ids in planned(TLI, skip=2).listed] == [[0, 1], []]
