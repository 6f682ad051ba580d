"""The drafter that copies: what it finds, what it says, and what comes out with it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.client import SamplingOptions
from crossdraft.config.engine import NgramOptions
from crossdraft.drafter import ngram as ngrams
from crossdraft.rpc.errors import BadRequest, ProtocolBroken
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.server import Server
from crossdraft.text.grammar import Grammar
from crossdraft.text.letters import NOTHING, ControlRole, Letters, from_bytes
from crossdraft.types.messages import Advance, Draft, Drafted, NoiseKey, OpenDrafter, Score
from tests.drafter.streaming import Epoch, drafted
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import AT_ONCE

PROMPT = from_bytes(b"one two three, one two ")
OPEN = OpenDrafter(PROMPT, SamplingOptions(), None, 8)
END = ControlRole.END_OF_SEQUENCE.letter
WORDS = st.lists(st.sampled_from([b"a", b"b", b"ab", b"\0", b"aab"]), max_size=30).map(b"".join)
SOME = 99  # letters: of one text more than any has
FACT = Letters("the moon is made of green cheese, as everybody knows")
ASKED = from_bytes(b"What is it? It is: ")


@pytest.fixture
async def ngram() -> AsyncIterator[DrafterClient]:
    served = ngrams.ngram_server(NgramOptions(), AT_ONCE)
    async with served as server, DrafterClient(server.address) as client:
        yield client


def text_of(draft: Drafted) -> str:
    return ngrams.byte_vocabulary().letters_of([draft_token.token for draft_token in draft.draft_tokens])


def naive(text: bytes, ending: bytes) -> tuple[int, list[int]]:
    """Letters of the longest match of an ending before any place of the text, and all places after such a match."""
    sizes = {
        place: next(size for size in range(len(ending), -1, -1) if text[:place].endswith(ending[len(ending) - size :]))
        for place in range(1, len(text) + 1)
    }
    longest = max(sizes.values(), default=0)
    return longest, [place for place, size in sizes.items() if size == longest]


@given(WORDS, st.integers(1, 4), st.integers(1, 9))
def test_the_longest_match_in_its_own_text_is_found_and_what_followed_the_newest_first(text, shortest, longest):
    ending = text[-longest:]
    size, places = naive(text[:-1], ending)
    found = ngrams.OwnText(text).longest(ending, shortest)
    assert found == (size if size >= shortest else 0)
    if found:
        followed = [(text[place:] * SOME)[:SOME] for place in reversed(places)]
        assert list(ngrams.OwnText(text).followed(ending[-size:], SOME)) == followed


@given(st.lists(WORDS, min_size=1, max_size=3), WORDS.filter(bool), st.integers(1, 20))
def test_the_longest_match_in_earlier_texts_is_found_and_all_that_followed(texts, ending, depth):
    text = b"".join(ngrams.BOUNDARY + one for one in texts)
    block, ending = ngrams.Block(text, depth), ending[-depth:]
    size, places = naive(text, ending)
    assert block.longest(ending, 1) == size
    assert block.longest(ending, size + 1) == 0
    if size > 0 and len(places) < ngrams.OCCURRENCES:
        followed = sorted(text[place:][:SOME] for place in places)
        assert sorted(block.followed(ending[len(ending) - size :], SOME)) == followed


def test_of_very_many_occurrences_some_are_looked_at() -> None:
    block = ngrams.Block(ngrams.BOUNDARY + b"ab" * 10_000, 8)
    assert ngrams.OCCURRENCES / 2 <= len(list(block.followed(b"ab", 3))) <= ngrams.OCCURRENCES


def test_what_followed_most_often_is_copied_as_far_as_it_is_likely_to_hold() -> None:
    assert ngrams.likeliest([b"xyz", b"abc", b"abd", b"abd"], 3, matched=100) == b"abd"
    assert ngrams.likeliest([b"xy", b"ab"], 2, matched=100) == b"xy"  # the first of equals
    alone = ngrams.likeliest([b"x" * 500], 500, matched=8)
    assert 8 / (8 + len(alone)) >= ngrams.LEAST_LIKELY > 8 / (8 + len(alone) + 1)
    one_of_many = [bytes([letter]) * 9 for letter in range(20)]
    assert ngrams.likeliest(one_of_many, 9, matched=30) == b""
    assert ngrams.likeliest([b"ab" + ngrams.BOUNDARY + b"c", b"a"], 4, matched=30) == b"ab"  # a text ends there
    assert ngrams.likeliest([], 4, matched=0) == ngrams.likeliest([b""], 4, matched=9) == b""


def remembered(memory: ngrams.TextMemory) -> dict[str, int]:
    """Letters, by scope."""
    return {scope: sum(len(block.text) for block in blocks) for scope, blocks in memory._blocks.items()}


def test_memory_has_a_limit_and_forgets_what_was_not_used_the_longest() -> None:
    limit = 40 * ngrams.LETTER_BYTES * 1000
    memory = ngrams.TextMemory(limit, 16)
    memory.add("used", b"something that is looked up again and again" * 100)
    for number in range(30):
        memory.add(f"client {number}", bytes([65 + number]) * 4000)
        (block,) = memory.of("used")
        assert block.longest(b"looked up again", 4) == 15
        assert next(block.followed(b"looked up ", 5)) == b"again"
        assert sum(remembered(memory).values()) * ngrams.LETTER_BYTES <= limit
    assert remembered(memory).keys() >= {"used", "client 29", "client 28"}
    assert not remembered(memory).keys() & {"client 0", "client 1"}


def test_many_small_scopes_take_no_more_than_the_limit() -> None:
    memory = ngrams.TextMemory(2**20, 16)
    for number in range(2000):
        memory.add(f"scope {number}", b"a short text")
    held = remembered(memory)
    assert (sum(held.values()) + ngrams.OF_BLOCK * len(held)) * ngrams.LETTER_BYTES <= 2**20
    assert list(held)[-1] == "scope 1999"
    memory.add("large", b"x" * 2**18)
    assert len(remembered(memory)) < len(held)


def test_texts_of_one_scope_become_few_blocks_and_long_ones_are_cut() -> None:
    memory = ngrams.TextMemory(2**20, 16)
    for number in range(100):
        memory.add("mine", b"text number %d " % number)
    assert len(memory._blocks["mine"]) < 10
    assert any(block.longest(b"text number 41", 4) == 14 for block in memory._blocks["mine"])
    memory.add("long", b"x" * 2**20)
    assert remembered(memory)["long"] < 2**20 / ngrams.LETTER_BYTES


async def test_it_describes_the_bytes_as_its_vocabulary(ngram: DrafterClient) -> None:
    description = await ngram.describe()
    assert (description.copies, description.vocabulary_size, description.affinity) == (True, 256, "")
    assert sorted(ngrams.byte_vocabulary().letters) == [chr(byte) for byte in range(256)]


async def test_a_draft_copies_what_followed_with_certainty(ngram: DrafterClient) -> None:
    draft = await drafted(ngram, OPEN, count=7)
    assert (text_of(draft), draft.reason) == ("three, ", "")
    assert draft.seconds > 0
    for draft_token in draft.draft_tokens:
        assert (draft_token.row.ids.tolist(), draft_token.row.probabilities.tolist()) == ([draft_token.token], [1.0])


async def test_noise_changes_nothing_and_rows_are_sent_when_they_are_wanted(ngram: DrafterClient) -> None:
    for opening in (replace(OPEN, row_width=0), replace(OPEN, noise=NoiseKey(3), audited=True)):
        draft = await drafted(ngram, opening, count=7)
        assert text_of(draft) == "three, "
        assert all((draft_token.row is None) == (opening.row_width == 0) for draft_token in draft.draft_tokens)


async def test_what_is_not_allowed_ends_the_draft(ngram: DrafterClient) -> None:
    allowed = np.array([ngrams.byte_vocabulary().ids_of(Letters(letter))[0] for letter in "thr"])
    draft = await drafted(ngram, replace(OPEN, allowed=allowed), count=7)
    assert (text_of(draft), draft.reason) == ("thr", "no earlier text goes on from here that far")


async def test_the_text_is_rewound_and_goes_on(ngram: DrafterClient) -> None:
    async with ngram.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 7))
        assert text_of(await session.draft(Draft(2, 5, Letters(" or two thr"), 3))) == "ee "
        draft = await session.draft(Draft(3, 2, Letters("xyz"), 4))
        assert (draft.draft_tokens, draft.reason) == ((), "no earlier text goes on from here that far")
        assert text_of(await session.draft(Draft(4, 0, Letters("one two "), 5))) == "one t"


async def test_copies_are_streamed_and_go_on_when_the_window_does(ngram: DrafterClient) -> None:
    async with ngram.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 5, 2, branch_depth=3))  # it prepares none
        epoch = await Epoch(1).complete(session, 5)
        await session.send(Advance(1, 12))
        await epoch.complete(session, 12)
        assert [len(reply.draft_tokens) for reply in epoch.replies] == [2, 2, 1, 2, 2, 2, 1]
        assert ngrams.byte_vocabulary().letters_of(epoch.tokens) == "three, one t"


async def test_it_stands_aside_when_the_rest_has_not_been_seen(ngram: DrafterClient) -> None:
    text = replace(OPEN, prompt=Letters(f"abcdef{END}g abcd"))
    async with ngram.session(text) as session:
        await session.send(Draft(1, 0, NOTHING, 1, 1))
        epoch = await Epoch(1).complete(session, 1)
        await session.send(Advance(1, 8))
        await epoch.complete(session, 2)
        assert (await epoch.hear(session)).reason == "no earlier text goes on from here that far"
        assert [reply.reason for reply in epoch.replies[:-1]] == ["", ""]
        await session.send(Advance(1, 9))  # which changes nothing
        assert text_of(await session.draft(Draft(2, 0, NOTHING, 2))) == "ef"


@asynccontextmanager
async def remembering(memory_mib: int = 1) -> AsyncIterator[tuple[ngrams.NgramService, DrafterClient]]:
    service = ngrams.NgramService(NgramOptions(memory_mib=memory_mib))
    async with Server(DRAFTER, service, AT_ONCE) as server, DrafterClient(server.address) as client:
        yield service, client


async def settled(client: DrafterClient, service: ngrams.NgramService) -> None:
    """All sessions that have closed are remembered: on one link what is sent first comes first."""
    async with client.session(OPEN):
        await asyncio.wrap_future(service._sorting.submit(int))


async def heard(client: DrafterClient, service: ngrams.NgramService, scope: str, text: Letters = FACT) -> None:
    """A session whose output is this text."""
    await drafted(client, OpenDrafter(ASKED, SamplingOptions(), None, 0, scope=scope), text)
    await settled(client, service)


async def drafted_in(client: DrafterClient, scope: str, text: bytes = b"Tell me: the moon is ") -> str:
    opening = OpenDrafter(from_bytes(text), SamplingOptions(), None, 0, scope=scope)
    return text_of(await drafted(client, opening, count=13))


async def test_earlier_outputs_of_the_same_scope_are_copied_and_no_others() -> None:
    async with remembering() as (service, client):
        await heard(client, service, "alice")
        assert await drafted_in(client, "alice") == "made of green"
        assert await drafted_in(client, "bob") == await drafted_in(client, "") == ""
        await heard(client, service, "")
        assert await drafted_in(client, "") == ""
        assert service.memory._blocks.keys() == {"alice"}
    async with remembering(0) as (service, client):  # without memory nothing is
        await heard(client, service, "alice")
        assert await drafted_in(client, "alice") == ""


async def test_only_what_is_verified_is_remembered() -> None:
    async with remembering() as (service, client):
        await heard(client, service, "alice")
        opening = OpenDrafter(from_bytes(b"It is: the moon is "), SamplingOptions(), None, 0, scope="alice")
        async with client.session(opening) as session:
            await session.send(Draft(1, 0, NOTHING, 13, 13))
            epoch = await Epoch(1).complete(session, 13)  # made of green
            await session.send(Advance(1, 17))
            await epoch.complete(session, 17)  # four of them are in the output
        await settled(client, service)
        assert service.memory._blocks["alice"][-1].text.endswith(b"the moon is made")
        async with client.session(opening) as session:
            await session.send(Draft(1, 0, Letters("MADE of"), 4))
            await session.draft(Draft(2, 2, Letters("D MEN"), 4))
        await settled(client, service)
        assert service.memory._blocks["alice"][-1].text.endswith(b"the moon is MAD MEN")


async def test_its_own_text_comes_first_where_matches_are_as_long() -> None:
    async with remembering() as (service, client):
        await heard(client, service, "alice", from_bytes(b"12345 comes after the moon is blue"))
        own = b"I say the moon is made of rock. But the moon is "
        assert (await drafted_in(client, "alice", own)).startswith("made of rock.")


async def test_scores_are_zero_or_one(ngram: DrafterClient) -> None:
    strings = tuple(map(Letters, ("t", "thr", "three, ", "three, o", "x")))
    async with ngram.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 7))
        assert (await session.score(Score(1, 0, strings, 7))).probabilities.tolist() == [1, 1, 1, 0, 0]
        assert (await session.score(Score(1, 0, strings, 3))).probabilities.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Draft(2, 9, NOTHING, 4), "cannot rewind to letter 9"),
        (Draft(2, 0, NOTHING, 4, adopt=1), "there is no branch 1: a drafter that copies prepares none"),
    ],
)
async def test_bad_drafts_end_the_session(ngram: DrafterClient, bad: Draft, complaint: str) -> None:
    async with ngram.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 4))
        with pytest.raises(ProtocolBroken, match=complaint):
            await session.draft(bad)


async def test_it_cannot_draw_the_targets_tokens(ngram: DrafterClient) -> None:
    with pytest.raises(ProtocolBroken, match="an n-gram drafter has no affinity matrix"):
        await ngram.open(replace(OPEN, redistribute="a target"))


@pytest.mark.full  # starts a process
def test_it_needs_no_torch() -> None:
    program = "import sys, crossdraft.drafter.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("grammar", "written", "expected"),
    [
        (None, "", 'one two {"a": 1, "'),
        (Grammar.regex("one (two|[a-z]+)"), "", "one two"),
        (Grammar.regex("one (three|ten)"), "", "one t"),
        (Grammar.choice(["zero or one"]), "", "zero or one"),  # nothing to copy: what must follow
        (Grammar.json({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}), '{"a"', ": "),
        (Grammar.choice(["one"]), "one", ""),
        (Grammar.choice(["one"]), "two", ""),
    ],
)
async def test_what_is_copied_is_cut_by_the_grammar_and_what_must_follow_is_added(ngram, grammar, written, expected):
    prompt = from_bytes(b'say: one two {"a": 1, "b": 2} and say: ')
    async with ngram.session(OpenDrafter(prompt, SamplingOptions(grammar=grammar), None, 8)) as session:
        await session.send(Draft(1, 0, Letters(written), 18))
        reply = await Epoch(1).hear(session)
    assert text_of(reply) == expected
    assert (reply.reason == "") == (len(expected) == 18)


async def test_a_grammar_that_cannot_be_compiled_is_refused(ngram: DrafterClient) -> None:
    with pytest.raises(BadRequest, match="unclosed group"):
        await drafted(ngram, replace(OPEN, options=SamplingOptions(grammar=Grammar.regex("("))))
