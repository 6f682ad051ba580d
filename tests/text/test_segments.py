"""Letters shown as text, and their word boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.text.letters import Letters, Role, from_bytes, to_bytes
from crossdraft.text.tokenization import LetterDecoder, last_word_boundary, segments_of
from tests.text.strategies import letters

END = Role.END_OF_SEQUENCE.letter


@given(letters, st.lists(st.integers(1, 4)))
def test_text_shown_in_pieces_is_the_text_shown_at_once(whole: Letters, lengths: list[int]) -> None:
    decoder, shown, rest = LetterDecoder(), "", whole
    for length in lengths:
        shown += decoder.feed(Letters(rest[:length]))
        rest = Letters(rest[length:])
    shown += decoder.feed(rest) + decoder.flush()
    assert shown == to_bytes(whole).decode("utf-8", "replace")


def test_an_incomplete_character_is_held_back_until_it_is_whole() -> None:
    decoder = LetterDecoder()
    unicorn = from_bytes("🦄".encode())
    assert [decoder.feed(Letters(letter)) for letter in unicorn] == ["", "", "", "🦄"]
    assert decoder.feed(Letters(unicorn[:2])) == ""
    assert decoder.feed(from_bytes(b"a")) == "\ufffda"


def test_a_flushed_decoder_begins_anew() -> None:
    decoder = LetterDecoder()
    assert decoder.feed(from_bytes(b"\xc3")) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(from_bytes(b"\xa9")) == "\ufffd"


def test_control_symbols_are_not_shown() -> None:
    assert LetterDecoder().feed(Letters("a" + END + "b")) == "ab"


@given(letters)
def test_segments_join_to_the_letters(whole: Letters) -> None:
    segments = segments_of(whole, "▁")
    assert "".join(segment.letters for segment in segments) == whole
    assert all(segment.text is None or segment.text.encode() == to_bytes(segment.letters) for segment in segments)


@pytest.mark.parametrize(
    ("text", "before", "boundary"),
    [
        ("the lazy dog", 12, 8),
        ("the lazy dog", 8, 8),
        ("the lazy dog", 7, 3),
        ("the  lazy", 5, 3),
        ("the\n\nlazy", 99, 3),
        (" the", 4, 0),
        ("the", 3, 0),
        ("", 0, 0),
        (f"the{END}lazy", 8, 4),
        (f"the{END}lazy", 3, 3),
    ],
)
def test_the_last_word_boundary(text: str, before: int, boundary: int) -> None:
    assert last_word_boundary(Letters(text), before) == boundary
