"""Where an output ends: at stop strings and ids, but not before so many tokens."""

import pytest

from crossdraft.session.output import Output, ShownText, fault_of_committed
from crossdraft.text.letters import Letters
from crossdraft.types.messages import OpenTarget, SamplingOptions
from tests.ports import asking, assignment
from tests.vocabularies import pair_of

PAIR = pair_of(("a", "b", "ab", "c"), ("a",), stops=(3,))


def written(ids: tuple[int, ...], min_tokens: int = 0, **settings: object) -> tuple[int, str]:
    """How many of the ids are committed when the output ends, and the text that is shown."""
    opening = OpenTarget((0,), SamplingOptions(min_tokens=min_tokens), None)
    given = assignment(pair=PAIR, max_tokens=len(ids), open_target=opening, **settings)
    output, shown, text = Output(given), ShownText(given), ""
    for count, token in enumerate(ids, 1):
        ending = output.commit(token)
        text += shown.add(PAIR.target.letters[token], ending and ending.kept)
        if ending is not None:
            resumed = asking(given, committed=ids[:count])
            assert fault_of_committed(resumed) == ""
            assert Output(resumed).ended == ending
            if count < len(ids):
                assert "where the output had ended" in fault_of_committed(asking(given, committed=ids[: count + 1]))
            return count, text
    raise AssertionError("it has no end")


E_ACUTE = tuple(map(chr, "é".encode()))


STOP = {"stop": (Letters("ba"),)}


@pytest.mark.parametrize(
    ("ids", "settings", "due"),
    [
        ((2, 2, 2), STOP, (2, "a")),
        ((2, 2, 2), STOP | {"include_stop_str_in_output": True}, (2, "aba")),
        ((2, 2, 2, 2), STOP | {"min_tokens": 2}, (3, "aba")),  # the second one is the first that counts
        ((2, 2, 2, 2), STOP | {"min_tokens": 2, "include_stop_str_in_output": True}, (3, "ababa")),
        ((0, 1, 2, 0), {"stop_token_ids": (2,)}, (3, "ab")),
        ((0, 1, 2, 0), {"stop_token_ids": (2,), "include_stop_str_in_output": True}, (3, "abab")),
        ((0, 3, 0), {}, (2, "a")),
        ((0, 3, 0), {"ignore_eos": True}, (3, "aca")),
        ((0, 3, 1, 0), {"ignore_eos": True, "stop_token_ids": (1,)}, (3, "ac")),
        ((0, 1, 1), {"stop": (Letters("abb"), Letters("bb")), "include_stop_str_in_output": True}, (3, "abb")),
    ],
)
def test_the_end_and_the_text(ids: tuple[int, ...], settings: dict[str, object], due: tuple[int, str]) -> None:
    assert written(ids, **settings) == due
