"""The letters of every id, and two vocabularies side by side."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.text import letters as letters_module
from crossdraft.text.letters import AFTER_ALL, END, EVENTS, NAMELESS, ControlRole, Letters, Side, codes_of, is_plain
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import TokenizerNotSupported, Trie, Vocabulary
from tests.text.kinds import PADDING, TOOL, Kind, kind

END_OF_SEQUENCE = ControlRole.END_OF_SEQUENCE.letter
words = st.lists(
    st.text("ab\x00\xff" + ControlRole.END_OF_TURN.letter, min_size=1, max_size=4), min_size=1, max_size=12
)


def test_each_id_has_letters_a_rank_and_its_kind(any_kind: Kind) -> None:
    vocabulary, drafter = any_kind.vocabulary(Side.TARGET), any_kind.vocabulary(Side.DRAFTER)
    assert vocabulary.size == any_kind.size
    for token, letters in enumerate(vocabulary.letters):
        assert letters
        assert vocabulary.ids_of(letters)[vocabulary.rank(token)] == token
    end, nameless = any_kind.id_of(any_kind.end), any_kind.id_of(any_kind.nameless)
    assert vocabulary.letters[end] == drafter.letters[end] == ControlRole.END_OF_SEQUENCE.letter
    assert vocabulary.letters[nameless] != drafter.letters[nameless]
    assert (nameless, any_kind.nameless) in vocabulary.nameless
    beyond = {vocabulary.letters[nameless], *vocabulary.letters[-PADDING:]}  # those beyond the tokenizer's ids, too
    assert len(beyond) == PADDING + 1
    assert not any(map(is_plain, beyond))
    assert vocabulary.letters[any_kind.id_of(TOOL)] == TOOL
    naive = vocabulary.letters[any_kind.id_of("naïve")]
    assert naive == letters_module.from_bytes("naïve".encode())  # byte-level tokenizers, too


def test_bytes_are_tokens_where_any_text_can_be_written_and_rank_behind_the_token_that_is() -> None:
    for name in ("gpt2", "llama3", "llama2", "unigram"):
        vocabulary = kind(name).vocabulary()
        assert all(vocabulary.ids_of(Letters(chr(value))) for value in range(256)), name
    llama2 = kind("llama2")
    byte, letter = llama2.id_of("<0x61>"), llama2.id_of("a")
    assert byte < letter
    assert llama2.vocabulary().ids_of(Letters("a")) == (letter, byte)
    assert llama2.tokenization().encode_continuation(Letters("a")) == (letter,)


@pytest.mark.parametrize(
    ("controls", "stops", "complaint"),
    [
        ([(kind("gpt2").size, "END_OF_SEQUENCE")], [], "is not an id of a vocabulary of"),
        ([], [-1], "id -1 is not an id"),
        ([(0, "END")], [], "unknown role 'END'; the roles are END_OF_SEQUENCE"),
    ],
)
def test_wrong_controls_are_named(controls: list[tuple[int, str]], stops: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Vocabulary.build(kind("gpt2").json, kind("gpt2").size, controls, stops, Side.TARGET)


@pytest.mark.parametrize("side", Side)
def test_a_vocabulary_has_no_more_ids_without_text_than_letters_for_them(side: Side) -> None:
    gpt2 = kind("gpt2")
    room = NAMELESS - len(Vocabulary.build(gpt2.json, gpt2.size, [], [], side).nameless)
    letters = Vocabulary.build(gpt2.json, gpt2.size + room, [], [], side).letters
    other = Side.DRAFTER if side is Side.TARGET else Side.TARGET
    assert letters[-1] == side.control(NAMELESS - 1) < AFTER_ALL
    assert other.control(0) not in letters
    for size in (gpt2.size + room + 1, 2**32 - 1):
        with pytest.raises(ValueError, match=rf"of {size} ids have no text in tokenizer.json, and at most 65535 may"):
            Vocabulary.build(gpt2.json, size, [], [], side)


@pytest.mark.parametrize(
    ("field", "value"), [("type", "WordPiece"), ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "##")]
)
def test_tokenizers_without_letters_are_refused(field: str, value: str) -> None:
    described = json.loads(kind("gpt2").json)
    described["model"][field] = value
    with pytest.raises(TokenizerNotSupported, match=value):
        Vocabulary.build(json.dumps(described), 10, [], [], Side.TARGET)


def _toy(side: Side, *letters: str, nameless: str = "<pad>") -> Vocabulary:
    """Tokens of these letters; an empty one is a control symbol without a role."""
    named = tuple(Letters(text) or side.control(token) for token, text in enumerate(letters))
    without = tuple((token, nameless) for token, text in enumerate(letters) if not text)
    return Vocabulary(letters=named, nameless=without)


def test_shared_tokens_are_those_with_the_letters_of_a_target_token() -> None:
    target = _toy(Side.TARGET, "a", "", "ab", "a", END_OF_SEQUENCE)
    pair = Pair(target, _toy(Side.DRAFTER, "b", "ab", "a", "", END_OF_SEQUENCE))
    assert not pair.same_vocabulary
    assert pair.shared_drafter_ids.tolist() == [1, 2, 4]
    assert [pair.target_id(token) for token in range(5)] == [None, 2, 0, None, 4]
    assert pair.to_target_ids(np.array([[4, 0], [1, 3]])).tolist() == [[4, -1], [2, -1]]
    assert pair.to_target_ids(np.array([0])).dtype == np.int64


@pytest.mark.parametrize(
    ("target", "drafter", "same"),
    [
        (_toy(Side.TARGET, "a", "a", "", "b"), _toy(Side.DRAFTER, "a", "a", "", "b"), True),
        (_toy(Side.TARGET, "a", ""), _toy(Side.DRAFTER, "a", "", nameless="<mask>"), False),
        # Text that only one side can write as a token is written with others there.
        (_toy(Side.TARGET, "a", "b", "", "ab"), _toy(Side.DRAFTER, "a", "b", ""), False),
        (_toy(Side.TARGET, "a", "b", ""), _toy(Side.DRAFTER, "a", "b", "", "ab"), False),
    ],
)
def test_in_one_vocabulary_every_id_is_itself(target: Vocabulary, drafter: Vocabulary, same: bool) -> None:
    pair = Pair(target, drafter)
    assert pair.same_vocabulary is same
    if same:
        assert [pair.target_id(token) for token in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("target", "drafter"), [(0, 3), (3, 0)])
def test_other_padding_rows_and_other_ends_leave_a_vocabulary_the_same(target: int, drafter: int) -> None:
    """As of an instruct model and a base model, which ends with another of the same symbols."""
    gpt2 = kind("gpt2")
    text, turn = gpt2.id_of("<|endoftext|>"), gpt2.id_of("<|im_end|>")
    ends = [(text, "END_OF_SEQUENCE"), (turn, "END_OF_TURN")]
    chat = Vocabulary.build(gpt2.json, gpt2.size + target, ends, [text, turn], Side.TARGET)
    base = Vocabulary.build(gpt2.json, gpt2.size + drafter, [(turn, "END_OF_SEQUENCE")], [turn], Side.DRAFTER)
    pair = Pair(chat, base)
    assert pair.same_vocabulary
    assert (pair.target_id(text), pair.target_id(turn)) == (text, turn)
    assert pair.shared_drafter_ids.tolist() == list(range(gpt2.size))
    assert {pair.target_id(token) for token in range(gpt2.size, base.size)} <= {None}


def test_a_token_is_shared_exactly_if_its_letters_are(any_kind: Kind) -> None:
    target, drafter = kind("qwen").vocabulary(), any_kind.vocabulary(Side.DRAFTER)
    pair = Pair(target, drafter)
    assert pair.same_vocabulary == (any_kind.name == "qwen")
    for token, letters in enumerate(drafter.letters):
        found = pair.target_id(token)
        if is_plain(letters):
            assert (found is not None) == (letters in target.letters)
        if is_plain(letters) and found is not None:
            assert target.letters[found] == letters


def vocabulary(*letters: str) -> Vocabulary:
    return Vocabulary(letters=tuple(map(Letters, letters)))


@given(words, st.text("ab", max_size=3))
def test_a_span_is_the_tokens_with_a_prefix(letters: list[str], prefix: str) -> None:
    trie = Trie(vocabulary(*letters))
    first, end = trie.span(Letters(prefix))
    assert sorted(trie.order[first:end].tolist()) == [i for i, text in enumerate(letters) if text.startswith(prefix)]


@given(words)
def test_spelling_keeps_every_string(letters: list[str]) -> None:
    spelling = letters_module.Spelling.of([Letters(text) for text in letters])
    for token, text in enumerate(letters):
        start = int(spelling.starts[token])
        assert spelling.rest(token, start).tolist() == codes_of(text).tolist()
        assert spelling.rest(token, start + 1).tolist() == codes_of(text[1:]).tolist()
        assert spelling.codes[start + len(text)] == END


def test_codes_tell_bytes_roles_and_sides_apart() -> None:
    known = "".join(map(chr, range(256))) + "".join(role.letter for role in ControlRole)
    codes = codes_of(known + Side.TARGET.control(0) + Side.DRAFTER.control(0)).tolist()
    assert codes[:256] == list(range(256))
    assert len(set(codes)) == len(codes) == EVENTS - 1
    assert END not in codes
    assert codes_of(Side.TARGET.control(60_000)).tolist() == codes_of(Side.TARGET.control(0)).tolist()
