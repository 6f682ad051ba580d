"""The drafter that copies: what it finds, what it says, and what comes out with it."""

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.client import GenerationRequest, SamplingOptions, connect
from crossdraft.drafter.ngram import MatchLengths, ServeNgram, byte_vocabulary, ngram_server
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import ControlRole, Letters, from_bytes
from crossdraft.types.messages import Advance, Draft, Drafted, NoiseKey, OpenDrafter, Score
from tests.drafter.streaming import Epoch
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.services.conftest import AT_ONCE
from tests.text.kinds import kind

PROMPT = from_bytes(b"one two three, one two ")
NOTHING = Letters("")
OPEN = OpenDrafter(PROMPT, SamplingOptions(), None, 8)
END = ControlRole.END_OF_SEQUENCE.letter


@pytest.fixture
async def ngram() -> AsyncIterator[DrafterClient]:
    async with ngram_server(ServeNgram(listening=AT_ONCE)) as server, DrafterClient(server.address) as client:
        yield client


def text_of(drafted: Drafted) -> str:
    return byte_vocabulary().letters_of([draft_token.token for draft_token in drafted.draft_tokens])


def naive(text: str, count: int, lengths: MatchLengths) -> str:
    """Every length from the longest, every place from the newest."""
    for size in range(min(lengths.longest, len(text) - 1), lengths.shortest - 1, -1):
        ending = text[-size:]
        if any(ord(letter) > 0xFF for letter in ending):
            continue
        for place in range(len(text) - size - 1, -1, -1):
            if text[place : place + size] == ending:
                copied = ""
                while len(copied) < count:
                    letter = (text + copied)[place + size + len(copied)]
                    if ord(letter) > 0xFF:
                        break
                    copied += letter
                return copied
    return ""


@given(
    text=st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", END]), max_size=30).map("".join),
    count=st.integers(1, 9),
    lengths=st.tuples(st.integers(1, 5), st.integers(0, 6)).map(lambda pair: MatchLengths(sum(pair), pair[0])),
)
def test_the_longest_match_goes_on_and_the_newest_of_several(text, count, lengths):
    assert continuation(Letters(text), count, lengths) == naive(text, count, lengths)


@pytest.mark.parametrize(("longest", "shortest"), [(4, 0), (3, 4), (-1, -1)])
def test_lengths_that_cannot_be_are_refused(longest, shortest):
    with pytest.raises(
        ValueError, match=f"--min-ngram must be between 1 and --max-ngram, got {shortest} and {longest}"
    ):
        MatchLengths(longest, shortest)


async def test_it_describes_the_bytes_as_its_vocabulary(ngram: DrafterClient) -> None:
    description = await ngram.describe()
    assert (description.copies, description.vocabulary_size, description.affinity) == (True, 256, "")
    assert sorted(byte_vocabulary().letters) == [chr(byte) for byte in range(256)]


async def test_a_draft_copies_what_followed_with_certainty(ngram: DrafterClient) -> None:
    async with ngram.session(OPEN) as session:
        drafted = await session.draft(Draft(1, 0, NOTHING, 7))
    assert (text_of(drafted), drafted.reason) == ("three, ", "")
    assert drafted.seconds > 0
    for draft_token in drafted.draft_tokens:
        assert (draft_token.row.ids.tolist(), draft_token.row.probabilities.tolist()) == ([draft_token.token], [1.0])


async def test_bytes_of_unfinished_characters_are_copied_too(ngram: DrafterClient) -> None:
    async with ngram.session(replace(OPEN, prompt=from_bytes("Größe, Grö".encode()))) as session:
        assert text_of(await session.draft(Draft(1, 0, NOTHING, 1))) == "\xc3"
        assert text_of(await session.draft(Draft(2, 1, NOTHING, 2))) == "\x9fe"


async def test_noise_changes_nothing_and_rows_are_sent_when_they_are_wanted(ngram: DrafterClient) -> None:
    for opening in (replace(OPEN, row_width=0), replace(OPEN, noise=NoiseKey(3), audited=True)):
        async with ngram.session(opening) as session:
            drafted = await session.draft(Draft(1, 0, NOTHING, 7))
        assert text_of(drafted) == "three, "
        assert all((draft_token.row is None) == (opening.row_width == 0) for draft_token in drafted.draft_tokens)


async def test_what_is_not_allowed_ends_the_draft(ngram: DrafterClient) -> None:
    allowed = np.array([byte_vocabulary().ids_of(Letters(letter))[0] for letter in "thr"])
    async with ngram.session(replace(OPEN, allowed=allowed)) as session:
        drafted = await session.draft(Draft(1, 0, NOTHING, 7))
    assert (text_of(drafted), drafted.reason) == ("thr", "no earlier text goes on from here that far")


async def test_the_text_is_rewound_and_goes_on(ngram: DrafterClient) -> None:
    async with ngram.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 7))
        assert text_of(await session.draft(Draft(2, 5, Letters(" or two thr"), 3))) == "ee "
        drafted = await session.draft(Draft(3, 2, Letters("xyz"), 4))
        assert (drafted.draft_tokens, drafted.reason) == ((), "no earlier text goes on from here that far")
        assert text_of(await session.draft(Draft(4, 0, Letters("one two "), 5))) == "one t"


async def test_copies_are_streamed_and_go_on_when_the_window_does(ngram: DrafterClient) -> None:
    async with ngram.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 5, 2, branch_depth=3))  # it prepares none
        epoch = await Epoch(1).complete(session, 5)
        await session.send(Advance(1, 12))
        await epoch.complete(session, 12)
        assert [len(reply.draft_tokens) for reply in epoch.replies] == [2, 2, 1, 2, 2, 2, 1]
        assert byte_vocabulary().letters_of(epoch.tokens) == "three, one t"


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


async def test_output_is_that_without_it_in_fewer_passes(ngram: DrafterClient, target: TargetClient) -> None:
    words = [token for token, text in enumerate(kind("gpt2").vocabulary().letters) if text in (" the", " dog", "ing")]
    options = SamplingOptions(0, logit_bias=tuple((token, 90.0) for token in words))  # nothing else comes
    request = GenerationRequest(
        "The quick dog", method="slem", num_speculative_tokens=24, max_tokens=40, options=options, overlap="off"
    )
    outputs, passes = [], []
    for drafter in (None, ngram.address):
        async with connect(target.address, drafter) as pipeline, pipeline.run(request) as generation:
            outputs.append([token.id async for token in generation])
            assert generation.statistics is not None
            assert generation.statistics.drafter_lost == ""
            passes.append(generation.statistics.passes)
    assert outputs[0] == outputs[1]
    assert passes[0] == 40
    assert passes[1] < 20


@pytest.mark.full  # starts a process
def test_it_needs_no_torch() -> None:
    program = "import sys, crossdraft.drafter.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
