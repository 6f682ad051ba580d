"""Two vocabularies side by side."""

import numpy as np

from crossdraft.text.letters import Letters, Role, Side, is_plain
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import Vocabulary
from tests.text.kinds import Kind, kind

END = Role.END_OF_SEQUENCE.letter


def _toy(side: Side, *letters: str) -> Vocabulary:
    """Tokens of these letters; an empty one is a control symbol without a role."""
    nameless = [token for token, text in enumerate(letters) if not text]
    named = tuple(Letters(text) or side.control(token) for token, text in enumerate(letters))
    return Vocabulary(letters=named, nameless=tuple((token, "<pad>") for token in nameless))


def test_shared_tokens_are_those_with_the_letters_of_a_target_token() -> None:
    pair = Pair(_toy(Side.TARGET, "a", "", "ab", "a", END), _toy(Side.DRAFTER, "b", "ab", "a", "", END))
    assert not pair.same_vocabulary
    assert pair.shared_drafter_ids.tolist() == [1, 2, 4]
    assert [pair.target_id(token) for token in range(5)] == [None, 2, 0, None, 4]
    assert pair.to_target_ids(np.array([[4, 0], [1, 3]])).tolist() == [[4, -1], [2, -1]]
    assert pair.to_target_ids(np.array([0])).dtype == np.int64


def test_in_one_vocabulary_every_id_is_itself() -> None:
    letters = ("a", "a", "", "b")
    pair = Pair(_toy(Side.TARGET, *letters), _toy(Side.DRAFTER, *letters))
    assert pair.same_vocabulary
    assert [pair.target_id(token) for token in range(4)] == [0, 1, 2, 3]


def test_control_symbols_of_other_names_make_another_vocabulary() -> None:
    target = Vocabulary(letters=(Letters("a"), Side.TARGET.control(0)), nameless=((1, "<pad>"),))
    drafter = Vocabulary(letters=(Letters("a"), Side.DRAFTER.control(0)), nameless=((1, "<mask>"),))
    assert not Pair(target, drafter).same_vocabulary


def test_a_byte_of_the_fallback_is_not_what_a_shared_letter_becomes() -> None:
    llama2, gpt2 = kind("llama2"), kind("gpt2")
    pair = Pair(llama2.vocabulary(), gpt2.vocabulary(Side.DRAFTER))
    assert pair.target_id(gpt2.id_of("a")) == llama2.id_of("a")


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
