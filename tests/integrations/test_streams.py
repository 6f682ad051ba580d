"""The text of one request, and the draft that goes on from it."""

from dataclasses import replace

import pytest

from crossdraft.integrations.vllm.streams import MAX_BEHIND, DrafterFaultError, DraftStream, Guess, Outcome, Pull
from crossdraft.speculation.choice import DraftSeen
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Advance, Branch, Draft, Drafted
from crossdraft.types.rows import DraftToken, Whose
from tests.vocabularies import greedy_tokens, pair_of

# ids:    0    1    2     3     4
TARGET = ["a", "b", "ab", "bb", "c"]
DRAFTER = ["a", "b", "c", "ba"]
PULL = Pull(window=6, first=2, chunk=2)


@pytest.fixture
def stream() -> DraftStream:
    pair = pair_of(TARGET, DRAFTER)
    return DraftStream(pair, greedy_tokens(pair.target))


def drafted(epoch: int, *tokens: int, first: int = 0, reason: str = "") -> Drafted:
    return Drafted(epoch, tuple(map(DraftToken, tokens)), 0.5, reason, first)


def test_a_draft_is_at_hand_as_target_tokens(stream: DraftStream) -> None:
    stream.emitted([2])  # ab
    assert stream.follow(PULL, 1.0) == [Draft(1, 0, Letters("ab"), 6, 2, first=2)]
    assert stream.asked == 1.0
    assert stream.guess(4) == Guess()
    assert stream.take(drafted(1, 0, 1, 2), 3.0) == DraftSeen(3, 2.0, 0.5)  # abc
    assert stream.asked is None
    assert stream.guess(4) == Guess((2, 4), sure=1)  # more text could make another token of the last one only
    assert stream.guess(1) == Guess((2,), sure=1)


def test_a_guess_has_no_more_tokens_than_may_be_proposed(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 2, 2, 2, 2), 1.0)
    assert stream.guess(2) == Guess((4, 4), sure=2)


def test_a_draft_goes_on_while_the_target_agrees(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 1, 2, 1), 1.0)  # abcb
    stream.guess(2)
    assert stream.emitted([2, 4]) == Outcome(2, False)
    assert stream.follow(PULL, 2.0) == [Advance(1, 9)]  # three of its tokens are passed
    assert stream.guess(4) == Guess((1,), sure=0)
    stream.take(drafted(1, 1, first=4), 3.0)
    assert stream.guess(4) == Guess((3,), sure=0)


def test_a_refusal_rewinds_the_drafter_to_what_agreed(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 3), 1.0)  # aba
    stream.guess(4)  # ab, a
    assert stream.emitted([2, 4]) == Outcome(1, False, edge=False)
    assert stream.guess(4) == Guess()
    assert stream.follow(PULL, 2.0) == [Draft(2, 2, Letters("c"), 6, 2, first=2)]
    assert stream.take(drafted(1, 0, first=2), 3.0) is None  # late: of the draft before
    assert stream.guess(4) == Guess()


def test_what_was_not_proposed_is_judged_all_the_same(stream: DraftStream) -> None:
    """The target's own next token is compared with the guess, however much of it was proposed."""
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 2, 2, 2), 1.0)
    stream.guess(3)
    assert stream.emitted([4]) == Outcome(1, False)
    stream.guess(3)
    assert stream.emitted([0]) == Outcome(0, True)
    assert stream.emitted([0]) == Outcome(0, False)  # there was no guess


def test_a_draft_that_the_target_overtook_goes_on_when_it_was_right(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.emitted([2, 4])  # abc, before anything came
    assert stream.follow(PULL, 1.0) == []
    stream.take(drafted(1, 0, 1), 2.0)
    assert stream.guess(4) == Guess()
    stream.take(drafted(1, 2, 0, 0, first=2), 3.0)
    assert stream.guess(4) == Guess((0, 0), sure=1)


def test_a_drafter_that_is_too_slow_begins_anew(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    for _ in range(2 * MAX_BEHIND):  # its first reply is under way: nothing is asked twice
        stream.emitted([4])
        assert stream.follow(PULL, 1.0) == []
    stream.take(drafted(1, 2, 2), 2.0)
    told = []
    for _ in range(MAX_BEHIND + 1):
        stream.emitted([4])
        told = stream.follow(PULL, 3.0)
    assert told == [Draft(2, 2, Letters("c" * (3 * MAX_BEHIND - 1)), 6, 2, first=2)]


def test_a_draft_that_has_ended_is_not_asked_for_more(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 1, reason="the context is full"), 1.0)
    assert stream.guess(4) == Guess((2,), sure=1)  # no more text comes behind it
    stream.emitted([2])
    assert stream.follow(PULL, 2.0) == []
    assert stream.stop(2.0) == []


def test_a_draft_that_is_not_wanted_is_stopped(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    assert stream.stop(2.0) == [Advance(1, 0)]
    assert stream.take(drafted(1, 0), 1.0) is None
    stream.emitted([4])
    assert stream.follow(PULL, 2.0) == [Draft(2, 0, Letters("c"), 6, 2, first=2)]


def test_a_prepared_continuation_that_agrees_is_at_hand_at_once(stream: DraftStream) -> None:
    """The drafter said ab, and that it would say bb after a b in place of its a."""
    prepared = replace(PULL, branch=2)
    stream.follow(prepared, 0.0)
    branch = Branch(1, 0, Letters("b"), (1, 0))
    stream.take(replace(drafted(1, 0, 1), branches=(branch,)), 1.0)
    assert stream.guess(4) == Guess((2,), sure=0)
    assert stream.emitted([1]) == Outcome(0, False, edge=False)
    assert stream.follow(prepared, 2.0) == [Draft(2, 0, Letters("b"), 8, 2, 2, adopt=1, first=4)]
    assert stream.guess(4) == Guess((1, 0), sure=1)  # its tokens, without waiting
    stream.take(drafted(2, 2, 2, first=2), 3.0)
    assert stream.emitted([1]) == Outcome(1, False)
    assert stream.guess(4) == Guess((0, 4, 4), sure=2)


def test_a_prepared_continuation_that_does_not_agree_is_forgotten(stream: DraftStream) -> None:
    prepared = replace(PULL, branch=2)
    stream.follow(prepared, 0.0)
    stream.take(replace(drafted(1, 0, 1), branches=(Branch(1, 0, Letters("b"), (1, 0)),)), 1.0)
    stream.emitted([4])
    assert stream.follow(prepared, 2.0) == [Draft(2, 0, Letters("c"), 6, 2, 2, first=2)]
    stream.take(drafted(2, 1), 3.0)
    stream.emitted([0])
    assert stream.follow(PULL, 4.0) == [Draft(3, 1, Letters("a"), 6, 2, first=2)]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (drafted(1, 4), "proposed id 4, and its ids are 0 to 3"),
        (drafted(1, -1), "proposed id -1"),
        (Drafted(1, (DraftToken(0, None, Whose.TARGET),), 0.5), "proposed id 0"),
        (drafted(1, *[0] * 7), "draft tokens 0 to 7, asked for 0 to 6"),
        (replace(drafted(1, 0), branches=(Branch(1, 0, Letters("b"), (1,)),)), "branch 1 is not one of at most 0 ids"),
        (drafted(1, 0, first=1), "draft tokens 1 to 2, asked for 0 to 6"),
    ],
)
def test_what_was_not_asked_for_is_a_fault(stream: DraftStream, reply: Drafted, text: str) -> None:
    stream.follow(PULL, 0.0)
    with pytest.raises(DrafterFaultError, match=text):
        stream.take(reply, 1.0)
