"""Tries: what starts with what."""

from hypothesis import given
from hypothesis import strategies as st

from crossdraft.text.letters import END, EVENTS, ControlRole, Letters, Side, Spelling, codes_of
from crossdraft.text.vocabulary import Trie, Vocabulary

words = st.lists(
    st.text("ab\x00\xff" + ControlRole.END_OF_TURN.letter, min_size=1, max_size=4), min_size=1, max_size=12
)


def vocabulary(*letters: str) -> Vocabulary:
    return Vocabulary(letters=tuple(map(Letters, letters)))


@given(words, st.text("ab", max_size=3))
def test_a_span_is_the_tokens_with_a_prefix(letters: list[str], prefix: str) -> None:
    trie = Trie(vocabulary(*letters))
    first, end = trie.span(Letters(prefix))
    assert sorted(trie.order[first:end].tolist()) == [i for i, text in enumerate(letters) if text.startswith(prefix)]


@given(words)
def test_spelling_keeps_every_string(letters: list[str]) -> None:
    spelling = Spelling.of([Letters(text) for text in letters])
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
