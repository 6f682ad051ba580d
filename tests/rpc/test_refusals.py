"""What means nothing is refused with a text that names the field, and is not sent."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from crossdraft.rpc import codec, frames
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import DRAFTER, MAX_SHARED, TARGET
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, Pass, PassDone, Sample
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.trees import TokenTree
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2
from tests.rpc.values import SIZE, column, lists

ROWS = codec.encode_rows([Row(np.array([1, 2]), np.array([0.5, 0.25]), 0.25)])
LOGGED = {
    "ids": ROWS.ids,
    "large": ROWS.large,
    "small": ROWS.small,
    "logged": [2],
    "log_probabilities": [-1, -2],
    "likely": [1],
    "likely_log_probabilities": [-1],
}
TOO_LIKELY = {
    "tokens": [1],
    "log_probabilities": [-1],
    "likely": [1],
    "likely_log_probabilities": [0.5],
    "likely_counts": [1],
}
LIKELY = {"tokens": [1, 2], "log_probabilities": [-1, -1], "likely": [1, 2], "likely_log_probabilities": [-1, -1]}

ONE = {"tokens": [1], "log_probabilities": [-1]}


def of(frame: Any, columns: dict[str, object] | None = None, **message: object) -> Any:
    """A frame with one message, of session 1."""
    kind = "requests" if "requests" in frame.DESCRIPTOR.fields_by_name else "replies"
    return frame(**{kind: [{"session": 1} | message]}, **columns or {})


def about(make: Callable[..., Any], part: str, **usual: object) -> Callable[..., Any]:
    """Makes a frame with this message, of the usual values but for those that are given."""
    return lambda **changes: make(**{part: usual | changes})


to_target, of_target = partial(of, target_pb2.VerifyRequests), partial(of, target_pb2.VerifyReplies)
to_drafter, of_drafter = partial(of, drafter_pb2.DraftRequests), partial(of, drafter_pb2.DraftReplies)
opening, fetching = about(to_target, "open", prompt=[1]), about(to_target, "fetch")
fetched = about(of_target, "fetched")
opening_drafter, scoring = about(to_drafter, "open"), about(to_drafter, "score")
drafting = about(to_drafter, "draft", letters=b"a", count=1)
branch = partial(dict, number=1, letters=b"a", tokens=[1])


def passing(listed: common_pb2.IdLists | None = None, **changes: object) -> Any:
    named = {"number": 1, "listed": len(listed.counts) if listed is not None else 0}
    return to_target({"listed": listed}, next_pass=named | changes)


def done(samples: dict[str, Any] | None = None, **changes: object) -> Any:
    return of_target({"samples": samples or {}}, done={"samples": len((samples or {}).get("tokens", ()))} | changes)


def drafted(rows: common_pb2.Rows | None = None, **changes: object) -> Any:
    return of_drafter({"rows": rows}, drafted={"with_rows": rows is not None} | changes)


def zeros(count: int) -> dict[str, object]:
    return {"count": count, "size": 1, "data": bytes(count)}


def tree(tokens: list[int], parents: list[int]) -> dict[str, object]:
    return {"tokens": tokens, "parents": parents}


TARGET_REQUESTS = [
    (to_target(), "one of open, next_pass, fetch, run_to, score and close"),
    (opening(prompt=[]), "prompt is empty"),
    (opening(prompt=[SIZE]), "prompt has the id 300"),
    (opening(options=common_pb2.SamplingOptions(temperature=-1)), "temperature must be 0 or more"),
    (opening(options=common_pb2.SamplingOptions(top_p=0)), "top_p must be above 0"),
    (opening(options=common_pb2.SamplingOptions(logit_bias=[common_pb2.LogitBias(id=SIZE)])), "logit_bias has"),
    (passing(committed=[SIZE]), "committed has the id 300"),
    (passing(tree=tree([SIZE], [0])), "tree.tokens has the id 300"),
    (passing(tree=tree([1, 2], [0])), "2 tokens but 1 parents"),
    (passing(tree=tree([1], [1])), "parents must come first"),
    (passing(tree=tree([1], [0]), listed=lists([1], 7)), "listed has 1 lists; it needs none or 2"),
    (passing(wanted=[0], listed=lists([1, 0], 7)), "listed has 2 lists; it needs none or 1"),
    (passing(listed=lists([1], SIZE)), "listed has the id 300"),
    (passing(listed=lists([2], 7)), "listed has 1 ids for lists of 2"),
    (passing(tree=tree([1], [0]), wanted=[1, 0]), "wanted must be ascending"),
    (passing(tree=tree([1], [0]), wanted=[1, 1]), "wanted must be ascending"),
    (passing(tree=tree([1], [0]), wanted=[2]), r"from 0 \(the root\) to 1 \(the last node\), got \(2,\)"),
    (passing(run=2), "a run of several tokens needs draws"),
    (passing(run=2, draws=True, tree=tree([1], [0])), "a run of several tokens needs draws, and has no tree"),
    (passing(run=65, draws=True), "run has 65; at most 64"),
    (fetching(listed=column(SIZE)), "listed has the id 300"),
    (fetching(listed={"count": 3, "size": 2, "data": b"abc"}), "3 bytes, which are not 3 numbers of 2"),
    (fetching(listed={"count": 1, "size": 5, "data": b"abcde"}), "not 1 numbers of 5"),
    (fetching(listed={"count": 2**32 - 1, "size": 0}), "numbers of 0"),
    (opening(head=2**32 - 1), f"head has {2**32 - 1}; at most {frames.MAX_HEAD}"),
    (opening(prompt=[1] * (codec.MAX_IDS + 1)), f"prompt has {codec.MAX_IDS + 1}"),
    (opening(options={"logit_bias": [{}] * (codec.MAX_BIASES + 1)}), "options.logit_bias has 65537"),
    (opening(options={"bad_word_ids": [{"ids": [1]}] * (codec.MAX_BIASES + 1)}), "options.bad_word_ids has 65537"),
    (opening(options={"bad_word_ids": [{}]}), "each of bad_word_ids must have at least one id"),
    (opening(options={"bad_word_ids": [{"ids": [SIZE]}]}), "options.bad_word_ids has the id 300"),
    (opening(options={"allowed_token_ids": [SIZE]}), "options.allowed_token_ids has the id 300"),
    (opening(options={"end_ids": [SIZE]}), "options.end_ids has the id 300"),
    (opening(stop_ids=[SIZE]), "stop_ids has the id 300"),
    (to_target(score={"first": 1, "likely": 21}), "likely must be at most 20, got 21"),
    (passing(tree=tree([1], [0, 0])), "tree.parents has 2; at most 1 are taken"),
    (passing(tree=tree([1], [0]), wanted=[0, 1, 1]), "wanted has 3; at most 2 are taken"),
    (opening(stop_ids=[1] * (codec.MAX_STOPS + 1)), "stop_ids has 65537; at most 65536"),
    (opening(options={"end_ids": [1] * (codec.MAX_STOPS + 1)}), "options.end_ids has 65537; at most 65536"),
    (opening(options={"bad_word_ids": [{"ids": [1] * (codec.MAX_WORDS // 2 + 1)}] * 2}), "bad_word_ids has 1048578"),
    (passing(tree={"tokens": [1] * (codec.MAX_NODES + 1)}), "tree.tokens has 1089; at most 1088 are taken"),
    (fetching(number=1, listed=zeros(codec.MAX_NUMBERS + 1)), f"listed has {codec.MAX_NUMBERS + 1}; at most"),
]
TARGET_REPLIES = [
    (of_target(), "one of opened, done, fetched, scored and ended"),
    (of_target({"rows": LOGGED | {"logged": [1, 1]}}, done={"rows": 1}), "rows.logged has 2 numbers for 1 rows"),
    (of_target({"rows": LOGGED | {"log_probabilities": [-1]}}, done={"rows": 1}), "rows has 2 tokens but 1 log-prob"),
    (of_target({"rows": LOGGED | {"log_probabilities": [-1, 1]}}, done={"rows": 1}), "rows has a log-probability that"),
    (of_target({"rows": LOGGED | {"likely": []}}, done={"rows": 1}), "rows has 0 likely ids and 1 values"),
    (of_target({"rows": LOGGED | {"likely": [SIZE]}}, done={"rows": 1}), "rows.likely has the id 300"),
    (done(number=1), "done needs rows or samples"),
    (
        of_target(
            {"rows": ROWS, "samples": {"tokens": [1], "log_probabilities": [-1]}}, done={"rows": 1, "samples": 1}
        ),
        "rows or samples",
    ),
    (done(samples={"tokens": [1], "log_probabilities": [0.5]}), "log-probability that is not at most 0"),
    (done(samples={"tokens": [1], "log_probabilities": [float("nan")]}), "log-probability that is not at most 0"),
    (done(samples={"tokens": [SIZE], "log_probabilities": [-1]}), "samples.tokens has the id 300"),
    (done(samples={"tokens": [1, 2], "log_probabilities": [-1]}), "2 tokens but 1 log-probabilities"),
    (done(samples=LIKELY | {"likely": [1]}), "1 likely ids and 2 values"),
    (done(samples=LIKELY | {"likely": [1] * 3, "likely_log_probabilities": [-1] * 3}), "3 likely ids and 3 values"),
    (done(samples=LIKELY | {"likely": [1, SIZE], "likely_counts": [1, 1]}), "samples.likely has the id 300"),
    (done(samples=LIKELY | {"likely_counts": [1] * 3}), "likely_counts has 3 numbers for 2 tokens"),
    (done(samples=TOO_LIKELY), "log-probability that is not at most 0"),
    (done(samples=ONE, hidden={"places": [1, 0], "states": b"abcd"}), r"states for the places \[1, 0\]"),
    (done(samples=ONE, hidden={"places": [0, 1, 2], "states": b"abcd"}), "hidden has 4 bytes of states"),
    (done(samples=ONE, hidden={"places": [0], "states": b"abc"}), "hidden has 3 bytes of states"),
    (done(samples=ONE, hidden={"states": b"ab"}), "hidden has 2 bytes of states"),
    (fetched(number=1), "a head or a whole row"),
    (fetched(head={}), "head has 0 rows"),
]
DRAFTER_REQUESTS = [
    (to_drafter(), "one of open, draft, advance, score and close"),
    (opening_drafter(audited=True), "audited needs noise"),
    (scoring(strings=[b"a"]), "tokens must be between 1 and 64"),
    (scoring(strings=[b"a"], tokens=65), "between 1 and 64, got 65"),
    (scoring(strings=[b"a", b""], tokens=1), r"strings\[1\] is empty"),
    (scoring(strings=[b"\xff"], tokens=1), r"strings\[0\] is not"),
    (opening_drafter(prompt=b"\xff"), "prompt is not the UTF-8"),
    (opening_drafter(prompt="中".encode()), r"U\+4E2D, which is no letter"),
    (opening_drafter(allowed=column(SIZE)), "allowed has the id"),
    (to_drafter(draft=drafter_pb2.Draft(letters=b"\xed\xa0\x80", count=1)), "letters is not"),
    (to_drafter(draft=drafter_pb2.Draft(letters=b"a")), "count must be between 1 and 64"),
    (drafting(count=2**32 - 1), "count must be between"),
    (drafting(chunk=0), "chunk must be between 1 and 64, got 0"),
    (drafting(chunk=65), "chunk must be between 1 and 64, got 65"),
    (drafting(branch_depth=65), "branch_depth must be at most 64, got 65"),
    (drafting(first=65), "first must be at most 64, got 65"),
    (drafting(tree_nodes=64), "tree_nodes must be at most 63, got 64"),
    (drafting(least_likely=1.5), "least_likely must be between 0 and 1, got 1.5"),
    (drafting(least_likely=float("nan")), "least_likely must be between 0 and 1, got nan"),
    (drafting(hidden={"places": [3]}), r"0 bytes of states for the places \[3\]"),
    (drafting(hidden={"places": range(codec.MAX_STATES + 1), "states": b"ab" * 4097}), "hidden.places has 4097"),
    (drafting(branch_width=0), "branch_width must be between 1 and 64, got 0"),
    (drafting(branch_width=65), "branch_width must be between"),
    (opening_drafter(row_width=frames.MAX_ROW_WIDTH + 1), "row_width has 65537"),
    (opening_drafter(allowed=zeros(codec.MAX_NUMBERS + 1)), "allowed has"),
    (scoring(strings=[b"a"] * (frames.MAX_STRINGS + 1), tokens=1), "strings has 4097"),
    (scoring(strings=[b"a" * (frames.MAX_STRING + 1)], tokens=1), "the longest of strings has 65537"),
]
DRAFTER_REPLIES = [
    (of_drafter(), "one of opened, drafted, scored and ended"),
    (drafted(tokens=[SIZE]), "tokens has the id 300"),
    (drafted(tokens=[0] * 65), "tokens has 65; at most 64 are taken"),
    (drafted(tokens=[0] * (codec.MAX_LISTS + 1), with_rows=True), "the frame's tokens with rows has 65537"),
    (drafted(tokens=[1, 2], rows=ROWS), "rows has 1 rows for 2 tokens"),
    (drafted(rows=ROWS), "rows has 1 rows for 0 tokens"),
    (of_drafter({"rows": ROWS}, drafted={"tokens": [1]}), "rows has 1 rows for 0 tokens"),
    (drafted(tokens=[3], rows=ROWS), "tokens has 3, which its own row cannot give"),
    (drafted(branches=[branch(number=0)]), r"branches\[0\].number must be at least 1"),
    (drafted(branches=[branch(letters=b"")]), r"branches\[0\].letters is empty"),
    (drafted(branches=[branch(letters=b"\xff")]), r"branches\[0\].letters is not the UTF-8"),
    (drafted(branches=[branch(tokens=[0] * 65)]), r"branches\[0\].tokens has 65; at most 64"),
    (drafted(branches=[branch(tokens=[SIZE])]), r"branches\[0\].tokens has the id 300"),
    (of_drafter(scored=drafter_pb2.Scored(probabilities=[1.5])), "not between 0 and 1"),
    (of_drafter(scored=drafter_pb2.Scored(probabilities=[float("nan")])), "not between 0 and 1"),
    (drafted(branches=[branch()] * (frames.MAX_BRANCHES + 1)), "the frame's branches has 4097"),
    (of_drafter(scored={"probabilities": [0.5] * (frames.MAX_STRINGS + 1)}), "probabilities has 4097"),
]
REFUSED = {
    TARGET.requests.decode: TARGET_REQUESTS,
    TARGET.replies.decode: TARGET_REPLIES,
    DRAFTER.requests.decode: DRAFTER_REQUESTS,
    DRAFTER.replies.decode: DRAFTER_REPLIES,
}


@pytest.mark.parametrize(
    ("decode", "bad", "complaint"), [(decode, *case) for decode, cases in REFUSED.items() for case in cases]
)
def test_what_means_nothing_or_asks_for_too_much_is_refused(decode, bad, complaint):
    try:
        ((_, error),) = decode(bad.SerializeToString(), SIZE)
    except BadMessage as spoiled:  # the whole frame
        error = spoiled
    assert isinstance(error, BadMessage)
    assert re.search(complaint, str(error)), error


SHARED_HALF = {"prompt": [1] * (MAX_SHARED // 2)}
BRANCHES_HALF = {"branches": [branch()] * (frames.MAX_BRANCHES // 2)}


@pytest.mark.parametrize(
    ("decode", "frame", "part", "complaint"),
    [
        (TARGET.requests.decode, target_pb2.VerifyRequests, {"open": SHARED_HALF}, "3 messages may have 2097152"),
        (DRAFTER.replies.decode, drafter_pb2.DraftReplies, {"drafted": BRANCHES_HALF}, "branches has 6144"),
    ],
    ids=["bytes", "branches"],
)
def test_what_messages_have_together_has_a_limit_below_that_of_each(decode, frame, part, complaint):
    def decoded(count: int) -> list[object]:
        messages = [{"session": session} | part for session in range(1, count + 1)]
        kind = "requests" if frame is target_pb2.VerifyRequests else "replies"
        return list(decode(frame(**{kind: messages}).SerializeToString(), SIZE))

    assert len(decoded(1)) == 1
    with pytest.raises(BadMessage, match=complaint):
        decoded(3)


def test_a_description_has_no_more_of_anything_than_it_may():
    plain = {"vocabulary_size": 9, "context": 9, "tokenizer_json": "{}", "fingerprint": "f"}
    many = codec.MAX_LISTS + 1
    for field in ({"controls": [{}] * many}, {"chat_template": {"tokens": {str(at): "" for at in range(many)}}}):
        with pytest.raises(BadMessage, match="has 65537; at most 65536"):
            codec.decode_description(common_pb2.Description(**plain | field))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (Pass(1, (), TokenTree(), wanted=()), "must want something"),
        (PassDone(1, (), 0.0), "not 0 and 0"),
        (PassDone(1, (Sample(1, -1.0), Row.certain(1)), 0.0), "not 1 and 1"),
        (PassDone(1, (Sample(1, -1.0),), -1.0), "seconds is -1"),
        (Drafted(1, (), float("nan")), "seconds is nan"),
        (Drafted(1, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),) * 4097), "4097 branches; at most 4096"),
        (Drafted(1, (DraftToken(1), DraftToken(1, Row.certain(1))), 0.0), "all have rows or none"),
        (Drafted(1, (DraftToken(1), DraftToken(1, None, Whose.TARGET)), 0.0), "use the same ids"),
    ],
)
def test_what_the_messages_cannot_say_is_refused_before_it_is_sent(value, complaint):
    encode = {Pass: TARGET.requests.encode, PassDone: TARGET.replies.encode, Drafted: DRAFTER.replies.encode}
    with pytest.raises(ValueError, match=complaint):
        encode[type(value)]([(1, value)])
