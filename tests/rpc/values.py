"""Hypothesis strategies for everything that travels between orchestrator and services."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from crossdraft.rpc import codec
from crossdraft.rpc.codec import GRID
from crossdraft.text.grammar import Grammar, GrammarKind
from crossdraft.text.letters import ControlRole, Letters, Side
from crossdraft.types import messages as plain
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.trees import MOST_NODES, ROOT, TokenTree
from crossdraft.v1 import common_pb2 as pb

SIZE = 300
numbers = st.integers(1, 2**32 - 1)
counts = st.integers(1, plain.MOST_DRAFT_TOKENS)
ids = st.integers(0, SIZE - 1)
id_tuples = st.lists(ids, max_size=6).map(tuple)
id_arrays = st.lists(ids, max_size=6).map(lambda listed: np.array(listed, dtype=np.int64))
seconds = st.integers(0, 2**32 - 1).map(lambda microseconds: microseconds / 1e6)
letters = st.lists(
    st.one_of(
        st.integers(0, 0xFF).map(chr),
        st.sampled_from(ControlRole).map(lambda role: role.letter),
        st.tuples(st.sampled_from(Side), st.integers(0, 99)).map(lambda pair: pair[0].control(pair[1])),
    ),
    max_size=12,
).map(lambda parts: Letters("".join(parts)))
noise = st.none() | st.builds(plain.NoiseKey, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
options = st.builds(
    plain.SamplingOptions,
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
    allowed_token_ids=st.lists(ids, max_size=3).map(tuple),
    bad_word_ids=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 1000),
    end_ids=st.lists(ids, max_size=3).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(min_size=1, max_size=9)),
)
log_probabilities = st.floats(-1e4, 0, width=32)


@st.composite
def rows(draw: st.DrawFn, whole: bool = False) -> Row:
    """Rows as they are sent: probabilities are steps of 2^-24, the tail completes them."""
    count = draw(st.integers(1, 20))
    listed = draw(st.lists(ids, min_size=count, max_size=count, unique=True))
    weights = np.array(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))) + 1e-3
    tail = 0.0 if whole else draw(st.just(0.0) | st.floats(0.01, 1))
    steps = np.rint(weights / (weights.sum() + tail) * (GRID - count)).astype(np.int64)
    steps[0] += 0 if tail else GRID - steps.sum()
    return Row(np.array(listed, dtype=np.int64), steps / GRID, (GRID - int(steps.sum())) / GRID)


@st.composite
def whole_rows(draw: st.DrawFn) -> Row:
    """Whole rows as they are sent: probabilities that float32 holds."""
    listed = draw(st.lists(ids, min_size=1, max_size=20, unique=True))
    weights = np.array(draw(st.lists(st.floats(1e-30, 1), min_size=len(listed), max_size=len(listed))))
    return Row(np.array(listed, dtype=np.int64), (weights / weights.sum()).astype(np.float32).astype(np.float64))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tokens = draw(id_tuples)
    return TokenTree(tokens, tuple(draw(st.integers(ROOT, node - 1)) for node in range(len(tokens))))


@st.composite
def passes(draw: st.DrawFn) -> plain.Pass:
    tree = draw(trees())
    wanted = draw(st.none() | st.sets(st.integers(0, len(tree)), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
    count = draw(st.sampled_from([0, 1 + len(tree) if wanted is None else len(wanted)]))
    listed = tuple(draw(st.lists(id_arrays, min_size=count, max_size=count)))
    run = draw(st.integers(1, plain.MAX_RUN)) if not tree.tokens and draw(st.booleans()) else 1
    return plain.Pass(draw(numbers), draw(id_tuples), tree, listed, wanted, run > 1 or draw(st.booleans()), run)


@st.composite
def drafts_made(draw: st.DrawFn) -> tuple[DraftToken, ...]:
    """The draft tokens of one reply."""
    whose = draw(st.sampled_from(Whose))
    if draw(st.booleans()):
        return tuple(DraftToken(token, None, whose) for token in draw(id_tuples))
    made = draw(st.lists(rows(whole=True), max_size=4))
    return tuple(DraftToken(draw(st.sampled_from(row.ids[row.probabilities > 0].tolist())), row, whose) for row in made)


@st.composite
def samples(draw: st.DrawFn) -> list[plain.Sample]:
    """Of one pass: each with as many likely ids."""
    likely = st.integers(0, 3).map(lambda count: st.tuples(*[st.tuples(ids, log_probabilities)] * count))
    return draw(st.lists(st.builds(plain.Sample, ids, log_probabilities, draw(likely)), min_size=1, max_size=4))


@st.composite
def logged(draw: st.DrawFn, row: Row, count: int) -> Row:
    """The row with log-probabilities, and with so many likely ids."""
    values = np.array(draw(st.lists(log_probabilities, min_size=len(row.ids), max_size=len(row.ids))))
    return replace(row, log_probabilities=values, likely=draw(st.tuples(*[st.tuples(ids, log_probabilities)] * count)))


maybe_logged = rows() | rows().flatmap(lambda row: logged(row, 2))
scored = samples().flatmap(
    lambda found: st.tuples(*(st.integers(0, 1000).map(lambda rank, one=one: replace(one, rank=rank)) for one in found))
)
offsets = st.integers(0, 2**40)
hidden = st.sets(offsets, max_size=4).map(lambda at: plain.HiddenStates(tuple(sorted(at)), b"abcdef" * len(at)))
nodes = st.lists(maybe_logged, min_size=1, max_size=4) | samples()
flags, small, likely = st.booleans(), st.integers(0, 1000), st.none() | st.integers(0, plain.MOST_LIKELY)
runs, shares, first = st.integers(1, plain.MAX_RUN), st.integers(1, 1000), st.integers(0, plain.MAX_RUN)
full_rows = whole_rows() | whole_rows().flatmap(lambda row: logged(row, 0))
fetched = full_rows | maybe_logged.filter(lambda row: not row.whole)
target_requests = st.one_of(
    st.builds(plain.OpenTarget, id_tuples.filter(bool), options, noise, small, likely, flags, id_tuples, flags),
    passes(),
    st.builds(plain.ScorePrompt, numbers, st.integers(0, plain.MOST_LIKELY)),
    st.builds(plain.FetchRow, numbers, st.integers(0, 100), st.none() | id_arrays),
    st.builds(plain.RunTo, numbers, numbers),
)
target_replies = st.one_of(
    st.builds(plain.Opened, st.text(max_size=8)),
    st.builds(plain.PassDone, numbers, nodes.map(tuple), seconds, seconds, flags, runs, shares, numbers, first, hidden),
    st.builds(plain.RowFetched, numbers, st.integers(0, 100), fetched),
    st.builds(plain.PromptScored, numbers, scored, seconds, st.booleans()),
)


@st.composite
def openings(draw: st.DrawFn) -> plain.OpenDrafter:
    key = draw(noise)
    audited = key is not None and draw(st.booleans())
    allowed = draw(st.none() | id_arrays)
    width, redistribute, templated = draw(st.integers(0, 1000)), draw(st.text(max_size=8)), draw(st.booleans())
    scope = draw(st.text(max_size=8))
    return plain.OpenDrafter(draw(letters), draw(options), key, width, allowed, redistribute, audited, templated, scope)


strings = st.lists(letters.filter(bool), max_size=4).map(tuple)
scores = st.lists(st.floats(0, 1), max_size=4).map(lambda listed: np.array(listed, dtype=np.float64))
drafts = st.builds(
    plain.Draft,
    epoch=numbers,
    offset=st.integers(0, 2**63),
    letters=letters,
    count=counts,
    chunk=counts,
    branch_depth=st.integers(0, plain.MOST_DRAFT_TOKENS),
    branch_width=counts,
    tree_nodes=st.integers(0, MOST_NODES),
    adopt=st.integers(0, 2**32 - 1),
    first=st.integers(0, plain.MOST_DRAFT_TOKENS),
    least_likely=st.floats(0, 1),
    hidden=hidden,
)
branches = st.builds(plain.Branch, numbers, st.integers(0, 2**63), letters.filter(bool), id_tuples.filter(bool))
drafter_requests = st.one_of(
    openings(),
    drafts,
    st.builds(plain.Advance, numbers, numbers),
    st.builds(plain.Score, numbers, st.integers(0, 2**63), strings, counts),
)
drafter_replies = st.one_of(
    st.builds(plain.Opened, st.text(max_size=8)),
    st.builds(
        plain.Drafted,
        epoch=numbers,
        draft_tokens=drafts_made(),
        seconds=seconds,
        reason=st.text(max_size=8),
        first=st.integers(0, 2**32 - 1),
        branches=st.lists(branches, max_size=3).map(tuple),
        queued=seconds,
    ),
    st.builds(plain.Scored, numbers, scores, seconds),
)


def column(*listed: int) -> pb.Numbers:
    """Numbers as they travel."""
    return codec.encode_numbers(np.array(listed, dtype=np.int64))


def lists(counts: Sequence[int], *ids: int) -> pb.IdLists:
    """Lists of ids as they travel."""
    return pb.IdLists(counts=counts, ids=column(*ids))
