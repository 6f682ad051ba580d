"""Messages survive the wire, rows keep their bits; what means nothing, or asks for too much, is refused."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.config.fields import typed
from crossdraft.rpc import codec, frames, generation
from crossdraft.rpc.codec import GRID, LEADING, MAX_BITS
from crossdraft.rpc.errors import BadMessage, BadRequest
from crossdraft.rpc.frames import DRAFTER, MAX_SHARED, TARGET
from crossdraft.rpc.generation import Committed, Generate
from crossdraft.session.models import with_defaults
from crossdraft.session.resolution import NODES_BESIDE_THE_DRAFT
from crossdraft.text.letters import Letters
from crossdraft.types import messages
from crossdraft.types.messages import Branch, Draft, Drafted, OpenTarget, Pass, PassDone, Sample, SamplingOptions
from crossdraft.types.output import Token
from crossdraft.types.request import MOST_PATHS, WIDEST, Chat, GenerationRequest, Message, Overlap
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.statistics import Kind, LaneFigures, Statistics
from crossdraft.types.trees import TokenTree
from crossdraft.v1 import common_pb2, drafter_pb2, generation_pb2, target_pb2
from crossdraft.verification.prefixes import MAX_ASKED
from tests.rpc.values import SIZE, column, lists

STEP = 1 / GRID
NO_PROMPT = "there is no prompt; give text, ids or a chat"
REQUESTED, REPLIED, TEXT = generation.decode_request, generation.decode_reply, {"text": "x"}


def one_of(decode: Any, frame: Any) -> Any:
    """The only message of a frame."""
    ((_, message),) = decode(frame.SerializeToString(), SIZE)
    if isinstance(message, BadMessage):
        raise message
    return message


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


def test_what_is_unset_is_the_default_and_of_what_an_older_peer_does_not_know_nothing_is_wanted():
    assert one_of(TARGET.requests.decode, opening()) == OpenTarget((1,), SamplingOptions(), None)
    draft = Draft(0, 0, Letters("a"), 5, messages.MOST_DRAFT_TOKENS, branch_depth=0, branch_width=1, adopt=0)
    assert one_of(DRAFTER.requests.decode, drafting(count=5)) == draft
    assert not generation.decode_request(generation_pb2.GenerateRequest(text="x")).together
    asked = one_of(DRAFTER.requests.decode, opening_drafter())
    assert (asked.redistribute, asked.audited) == ("", False)
    told = common_pb2.Description(tokenizer_json="{}", vocabulary_size=SIZE, context=4, fingerprint="f")
    assert codec.decode_description(told).affinity == ""
    assert not codec.decode_description(told).copies


def test_a_targets_own_settings_survive_and_those_that_cannot_be_are_refused():
    for own in (messages.SamplingDefaults(), messages.SamplingDefaults(0.0, 0, 0.5, 0.0, 1.1, 7, 9)):
        about = messages.Description("m", "{}", (), (), SIZE, 4, "f", defaults=own)
        assert codec.decode_description(codec.encode_description(about)).defaults == own
    message = codec.encode_description(about)
    message.defaults.top_p = 2
    with pytest.raises(BadMessage, match="defaults: top_p must be above 0"):
        codec.decode_description(message)


@given(st.binary(max_size=12))
def test_letters_are_what_was_meant_or_refused(raw):
    try:
        letters = codec.decode_letters(raw, "text")
    except BadMessage:
        return
    assert letters.encode() == raw


def test_ids_of_the_target_are_left_to_those_who_know_them():
    reply = {"tokens": [SIZE], "target_ids": True, "branches": [branch(tokens=[SIZE])]}
    got = one_of(DRAFTER.replies.decode, of_drafter(drafted=reply))
    (one,) = got.draft_tokens
    assert (one.token, one.whose, got.branches[0].tokens) == (SIZE, Whose.TARGET, (SIZE,))


def test_a_duration_longer_than_a_message_holds_is_the_longest():
    ((_, got),) = DRAFTER.replies.decode(DRAFTER.replies.encode([(1, Drafted(1, (), 1e9))]), SIZE)
    assert got.seconds == pytest.approx(2**32 / 1e6, abs=1e-5)


def travelled(*rows: Row) -> list[Row]:
    raw = codec.encode_rows(rows).SerializeToString()
    return codec.decode_rows(common_pb2.Rows.FromString(raw), "rows", None)


@given(st.lists(st.integers(0, 2**MAX_BITS - 1) | st.integers(0, 9), max_size=40))
def test_numbers_survive_in_as_few_bytes_as_the_largest_needs(listed):
    message = column(*listed)
    sent = common_pb2.Numbers.FromString(message.SerializeToString())
    assert codec.decode_numbers(sent, "numbers").tolist() == listed
    if listed:
        assert len(message.data) == len(listed) * max(1, -(-max(listed).bit_length() // 8))


@given(st.lists(st.floats(1e-12, 1), min_size=1, max_size=40), st.floats(0, 1), st.booleans())
def test_other_rows_are_rounded_and_stay_whole_or_keep_a_tail(weights, rest, whole):
    total = sum(weights) + (0 if whole else rest)
    row = Row(np.arange(len(weights)), np.array(weights) / total, 0.0 if whole else rest / total)
    (got,) = travelled(row)
    assert got.whole == row.whole
    assert got.probabilities.sum() + got.tail == 1  # exactly
    moved = np.abs(got.probabilities - row.probabilities)
    more = np.flatnonzero(moved > STEP / 2)
    assert len(more) <= 1  # it takes what rounding leaves, and is as large as any
    assert (row.probabilities[more] >= row.probabilities.max() - STEP).all()
    assert (moved[more] <= STEP * (2 + len(weights) / 2)).all()


def test_a_probability_does_not_depend_on_what_else_is_listed():
    rng = np.random.default_rng(0)
    distribution = np.sort(rng.pareto(1.0, 5000))[::-1] / 1.0
    distribution /= distribution.sum()
    head, more = np.arange(64), np.array([900, 70, 4000])
    short = Row(head, distribution[:64], float(distribution[64:].sum()))
    both = np.append(head, more)
    listed = Row(both, distribution[both], float(distribution[64:].sum() - distribution[more].sum()))
    got = travelled(short, listed)
    assert got[0].probabilities.tolist() == got[1].probabilities[:64].tolist()
    assert got[0].tail == pytest.approx(got[1].tail + got[1].probabilities[64:].sum(), abs=1e-15)


def test_every_row_comes_with_its_length_and_tail() -> None:
    lengths = (0, 1, LEADING - 1, LEADING, LEADING + 1, 40, 0)
    sent = [Row(np.arange(count), np.full(count, 2.0**-10), 1 - count * 2.0**-10) for count in lengths]
    got = travelled(*sent)
    assert ([len(row.ids) for row in got], [row.tail for row in got]) == (list(lengths), [row.tail for row in sent])


@pytest.mark.parametrize(
    ("listed", "tail"),
    [([0.5], 0.0), ([0.5], 0.6), ([1.5, -0.5], 0.0), ([np.nan], 0.0), ([0.5], np.nan), ([np.inf], 0.0)],
)
def test_what_is_no_distribution_is_not_sent(listed, tail):
    bad = Row(np.arange(len(listed)), np.array(listed), tail)
    with pytest.raises(ValueError, match="rows must be distributions"):
        codec.encode_rows([Row.certain(3), bad])


def test_the_bounds_leave_room_for_what_an_orchestrator_asks() -> None:
    assert codec.MAX_NODES >= MOST_PATHS * messages.MOST_DRAFT_TOKENS + NODES_BESIDE_THE_DRAFT
    assert frames.MAX_HEAD >= WIDEST
    assert frames.MAX_ROW_WIDTH >= WIDEST
    assert frames.MAX_STRINGS >= MAX_ASKED


PARTS: dict[str, Callable[[generation_pb2.GenerateRequest], Any]] = {
    "request": lambda request: request,
    "chat": lambda request: request.chat,
    "message": lambda request: request.chat.messages.add(),
    "options": lambda request: request.options,
    "grammar": lambda request: request.options.grammar,
    "bias": lambda request: request.options.logit_bias.add(),
    "word": lambda request: request.options.bad_word_ids.add(),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_later_version_asks_for_is_refused(part: str) -> None:
    """Without it the output would be another."""
    request = generation_pb2.GenerateRequest()
    PARTS[part](request).MergeFromString(b"\xf8\x3f\x05")  # field 1023, a number
    of_options = common_pb2.SamplingOptions.FromString(request.options.SerializeToString())
    which = r"the fields \[1023\]" if part == "request" else "fields in its parts"
    with pytest.raises(BadMessage, match=f"^the request has {which}, which this version does not know: update"):
        generation.decode_request(request)
    if of_options.ByteSize():
        with pytest.raises(BadMessage, match=r"^options has .*fields.*, which this version does not know: update"):
            codec.decode_options(of_options, 100)


ROWS = codec.encode_rows([Row(np.array([1, 2]), np.array([0.5, 0.25]), 0.25)])
LOGS = {"logged": [2], "log_probabilities": [-1, -2], "likely": [1], "likely_log_probabilities": [-1]}
LOGGED = {"ids": ROWS.ids, "large": ROWS.large, "small": ROWS.small} | LOGS
ONE = {"tokens": [1], "log_probabilities": [-1]}
TOO_LIKELY = {**ONE, "likely": [1], "likely_log_probabilities": [0.5], "likely_counts": [1]}
LIKELY = {"tokens": [1, 2], "log_probabilities": [-1, -1], "likely": [1, 2], "likely_log_probabilities": [-1, -1]}


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


def of_rows(**changes: object) -> Any:
    """A reply to a pass with two rows."""
    ids = common_pb2.IdLists(counts=[2, 1], ids=column(1, 2, 1))
    return of_target({"rows": {"ids": ids, "large": column(GRID // 2, 3, GRID)} | changes}, done={"rows": 2})


def of_whole(ids: tuple[int, ...], *probabilities: float) -> Any:
    raw = np.array(probabilities, dtype="<f4").tobytes()
    return fetched(whole=common_pb2.WholeRow(ids=column(*ids), probabilities=raw))


def test_what_the_bad_rows_are_made_from_is_good():
    assert [row.tail for row in one_of(TARGET.replies.decode, of_rows()).nodes] == [0.5 - 3 * STEP, 0.0]


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
    (passing(run=65, draws=True), "run must be between 0 and 64, got 65"),
    (fetching(listed=column(SIZE)), "listed has the id 300"),
    (fetching(listed={"count": 3, "size": 2, "data": b"abc"}), "3 bytes, which are not 3 numbers of 2"),
    (fetching(listed={"count": 1, "size": 5, "data": b"abcde"}), "not 1 numbers of 5"),
    (fetching(listed={"count": 2**32 - 1, "size": 0}), "numbers of 0"),
    (opening(head=2**32 - 1), f"head must be between 0 and {frames.MAX_HEAD}, got {2**32 - 1}"),
    (opening(prompt=[1] * (codec.MAX_IDS + 1)), f"prompt has {codec.MAX_IDS + 1}"),
    (opening(options={"logit_bias": [{}] * (codec.MAX_BIASES + 1)}), "options.logit_bias has 65537"),
    (opening(options={"bad_word_ids": [{"ids": [1]}] * (codec.MAX_BIASES + 1)}), "options.bad_word_ids has 65537"),
    (opening(options={"bad_word_ids": [{}]}), "bad_word_ids must be a tuple of tuples of token ids, each with"),
    (opening(options={"bad_word_ids": [{"ids": [SIZE]}]}), "options.bad_word_ids has the id 300"),
    (opening(options={"allowed_token_ids": [SIZE]}), "options.allowed_token_ids has the id 300"),
    (opening(options={"end_ids": [SIZE]}), "options.end_ids has the id 300"),
    (opening(stop_ids=[SIZE]), "stop_ids has the id 300"),
    (to_target(score={"first": 1, "likely": 21}), "likely must be between 0 and 20, got 21"),
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
    (of_target({"rows": ROWS, "samples": ONE}, done={"rows": 1, "samples": 1}), "rows or samples"),
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
    (of_rows(ids=lists([2, 1], 1, SIZE, 1)), "rows.ids has the id 300"),
    (of_rows(ids=lists([2, 1], 1, 1, 1)), "not distinct"),
    (of_rows(ids=lists([2, 2], 1, 2, 1)), "3 ids for lists of 4"),
    (of_rows(ids=lists([3], 1, 2, 1)), "not distinct"),
    (of_rows(large=column(5, 5)), "3 ids, but 2 large and 0 small"),
    (of_rows(small=column(5)), "3 ids, but 3 large and 1 small"),
    (of_rows(large=column(GRID, 1, GRID)), "sums to 1"),
    (of_rows(large=column(5, 5, 3 * GRID)), "sums to 3"),
    (of_rows(large={"count": 3, "size": 5, "data": bytes(15)}), "not 3 numbers of 5"),
    (of_whole((1, SIZE), 0.5, 0.5), "the vocabulary has 300 ids"),
    (of_whole((1,), 0.5, 0.5), "1 ids but 8 bytes"),
    (of_whole((1, 1), 0.5, 0.5), "not distinct"),
    (of_whole((1, 2), 0.5, float("nan")), "between 0 and 1"),
    (of_whole((1, 2), 0.5, float("inf")), "between 0 and 1"),
    (of_whole((1, 2), 1.5, -0.5), "between 0 and 1"),
    (of_whole((1, 2), 0.5, 0.25), "sums to 0.75"),
    (of_whole(()), "sums to 0;"),
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
    (drafting(branch_depth=65), "branch_depth must be between 0 and 64, got 65"),
    (drafting(first=65), "first must be between 0 and 64, got 65"),
    (drafting(tree_nodes=64), "tree_nodes must be between 0 and 63, got 64"),
    (drafting(least_likely=1.5), "least_likely must be between 0 and 1, got 1.5"),
    (drafting(least_likely=float("nan")), "least_likely must be between 0 and 1, got nan"),
    (drafting(hidden={"places": [3]}), r"0 bytes of states for the places \[3\]"),
    (drafting(hidden={"places": range(codec.MAX_STATES + 1), "states": b"ab" * 4097}), "hidden.places has 4097"),
    (drafting(branch_width=0), "branch_width must be between 1 and 64, got 0"),
    (drafting(branch_width=65), "branch_width must be between"),
    (opening_drafter(row_width=frames.MAX_ROW_WIDTH + 1), "row_width must be between 0 and 65536, got 65537"),
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


@pytest.mark.parametrize(("decode", "bad", "complaint"), [(one, *case) for one in REFUSED for case in REFUSED[one]])
def test_what_means_nothing_or_asks_for_too_much_is_refused(decode, bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        one_of(decode, bad)


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
        sent = [{"session": session} | part for session in range(1, count + 1)]
        kind = "requests" if frame is target_pb2.VerifyRequests else "replies"
        return list(decode(frame(**{kind: sent}).SerializeToString(), SIZE))

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


TEXTS = st.text(max_size=8)
IDS = st.tuples() | st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
COUNTS = st.integers(0, 2**32 - 1)
MESSAGES = st.builds(Message, TEXTS.filter(bool), TEXTS)
PROMPTS = TEXTS.filter(bool) | IDS.filter(bool) | st.lists(MESSAGES, min_size=1, max_size=3).map(tuple).map(Chat)
FEW = st.integers(1, 16)
REQUESTS = st.builds(
    GenerationRequest,
    PROMPTS,
    options=st.builds(SamplingOptions, st.floats(0, 9), st.integers(0, 9), st.floats(0.1, 1)),
    method=st.none() | TEXTS,
    drafter_temperature=st.none() | st.floats(0, 9),
    seed=st.none() | st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    stop=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
    bad_words=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
    committed=IDS,
    stop_token_ids=IDS,
    truncate_prompt_tokens=st.sampled_from([None, -1, 7]),
    prompt_logprobs=st.none() | st.integers(0, 20),
    cache_salt=TEXTS,
    overlap=st.sampled_from([Overlap.AUTO, Overlap.ON]),
    max_draft_tokens=st.none() | st.integers(16, 64),
    logprobs=st.none() | st.integers(0, 20),
    **dict.fromkeys(("min_draft_tokens", "branches", "branch_width"), st.none() | FEW),
    **dict.fromkeys(("num_speculative_tokens", "max_tokens", "paths", "head", "row_width"), FEW),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), st.booleans()),
    **dict.fromkeys(("allow_inexact", "audit", "speculation"), st.booleans()),
)


@given(st.builds(Generate, REQUESTS, id=TEXTS, model=TEXTS, drafter=st.none() | TEXTS, together=st.booleans()))
def test_requests(asked: Generate) -> None:
    sent = generation.encode_request(asked).SerializeToString()
    assert generation.decode_request(generation_pb2.GenerateRequest.FromString(sent)) == asked


def test_what_is_left_out_is_told_from_what_is_the_default() -> None:
    usual = SamplingOptions(1.0, 0, 1.0, 0.0, 1.0)
    own = messages.SamplingDefaults(0.5, 20, 0.8, 0.1, 1.05, 700)
    named, filled = SamplingOptions(top_p=1.0, presence_penalty=1.0), SamplingOptions(0.5, 20, 0.8, 0.1, 1.05)
    for options, tokens, due in (
        ({"options": usual, "max_tokens": 128}, 128, usual),
        ({}, 700, filled),
        ({"options": named}, 700, replace(filled, top_p=1.0, presence_penalty=1.0)),
    ):
        sent = generation.encode_request(Generate(GenerationRequest("x", **options))).SerializeToString()
        got = with_defaults(generation.decode_request(generation_pb2.GenerateRequest.FromString(sent)).request, own)
        assert (got.options, got.max_tokens) == (due, tokens)


def names(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def test_every_field_has_its_place() -> None:
    asked = (names(GenerationRequest) | names(Generate)) - {"prompt", "request", "explain", "record"}
    assert set(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "ids", "chat"} == asked
    assert set(generation_pb2.Statistics.DESCRIPTOR.fields_by_name) == names(Statistics)
    lane = (names(LaneFigures) - {"address", "trips"}) | {"trip_counts", "trip_seconds", "queued_seconds"}
    assert set(generation_pb2.Lane.DESCRIPTOR.fields_by_name) == lane


RAW, LOG = st.binary(max_size=4), st.floats(-99, 0)
TOPS = st.lists(st.tuples(COUNTS, RAW, LOG), max_size=3).map(tuple)
TOKENS = st.builds(Token, COUNTS, TEXTS, RAW, st.sampled_from(Kind), st.none() | LOG, TOPS)


@given(st.builds(Committed, st.lists(TOKENS, min_size=1, max_size=3).map(tuple), st.floats(0, 1e6)))
def test_tokens(tokens: Committed) -> None:
    sent = generation.encode_reply(tokens).SerializeToString()
    assert generation.decode_reply(generation_pb2.GenerateReply.FromString(sent)) == tokens


@pytest.mark.parametrize(
    ("decode", "message", "error", "complaint"),
    [
        *((REQUESTED, one, BadMessage, NO_PROMPT) for one in ({}, {"ids": {}}, {"chat": {}})),
        (REQUESTED, TEXT | {"overlap": 7}, BadMessage, "overlap has the value 7; known are AUTO, ON, OFF"),
        (REQUESTED, TEXT | {"options": {"temperature": -1}}, BadMessage, "options: temperature must be 0 or more"),
        (REPLIED, {"token": {"id": 1}}, BadMessage, r"token\.kind is not set"),
        (REPLIED, {"ended": {}}, BadMessage, r"ended\.reason is not set"),
        (REPLIED, {}, BadMessage, "one of prompt, token and ended"),
        (REQUESTED, TEXT | {"num_speculative_tokens": 65}, BadRequest, "must be between 1 and 64, got 65"),
        (REQUESTED, TEXT | {"max_tokens": 2**31}, BadRequest, r"max_tokens must be between 0 and 2\*\*31 - 1, got"),
        (REQUESTED, TEXT | {"overlap": 2, "max_draft_tokens": 3}, BadRequest, "has no effect with overlap off"),
    ],
)
def test_what_means_nothing_or_cannot_be_is_refused(decode, message, error, complaint):
    kind = generation_pb2.GenerateRequest if decode is REQUESTED else generation_pb2.GenerateReply
    with pytest.raises(error, match=complaint):
        decode(kind(**message))


@pytest.mark.parametrize(
    ("make", "message"),
    [(partial(GenerationRequest, "x"), generation_pb2.GenerateRequest), (SamplingOptions, common_pb2.SamplingOptions)],
)
def test_every_whole_number_in_the_range_of_an_option_fits_its_field(make: Any, message: Any) -> None:
    whole = [one for one, kinds, _ in typed(getattr(make, "func", make)) if int in kinds and float not in kinds]
    sent = [one for one in whole if one.name in message.DESCRIPTOR.fields_by_name]
    assert len(sent) > (1 if make is SamplingOptions else 15)
    for one in sent:
        assert {"ge", "le"} <= {*one.metadata}, f"{one.name} needs a range: gRPC's own error would name no field"
        for bound in (one.metadata["ge"], one.metadata["le"]):
            message(**{one.name: getattr(make(**{one.name: bound}), one.name)})


@pytest.mark.parametrize(("name", "value"), [("model", 5), ("drafter", ["a"]), ("id", b"\xff")])
def test_what_does_not_fit_its_field_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        generation.encode_request(Generate(GenerationRequest("x"), **{name: value}))  # type: ignore[arg-type]


def test_defaults_of_sampling_are_unset_and_what_truncates_is_the_drafters_too() -> None:
    sent = {one.name for one, _ in codec.encode_options(SamplingOptions()).ListFields()}
    assert sent == {"temperature", "top_p", "repetition_penalty"}  # as older services have these
    lists = {"logit_bias": ((1, 2.0),), "allowed_token_ids": (1,), "end_ids": (3,)}
    whole = SamplingOptions(0.5, 7, 0.9, 0.1, 1.2, 0.3, 0.4, min_tokens=5, **lists)
    assert whole.of_drafter == SamplingOptions(0.5, 7, 0.9, 0.1)
