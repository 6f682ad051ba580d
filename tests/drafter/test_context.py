"""A drafter's text: rewinding, re-tokenizing, cutting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from crossdraft.drafter.context import MOST_AGAIN, Context, NoRoomError
from crossdraft.text.letters import ControlRole, Letters, Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from tests.text.kinds import kind

PROMPT = from_bytes(b"The quick brown fox doesn't")
KINDS = ("gpt2", "llama3", "o200k", "deepseek", "llama2", "mistral", "gemma")
words = st.lists(
    st.sampled_from([" the", " dog", " Größe", "\n", "  ", "ing", " it's", "好", "\xe4", " 20000", "):", "."]),
    max_size=8,
).map(lambda parts: from_bytes("".join(parts).encode()))
UNKNOWN = Side.TARGET.control(3)
mixed = st.lists(st.sampled_from([UNKNOWN, UNKNOWN, " the", " dog", "Ж".encode().decode("latin-1"), "s"]), max_size=8)


def tokenization(name: str) -> Tokenization:
    return kind(name).tokenization(Side.DRAFTER)


def written(context: Context, name: str, head: int) -> Letters:
    return tokenization(name).letters_of(context.ids[head:])


def head_of(name: str) -> int:
    return len(tokenization(name).encode_prompt_letters(PROMPT))


def drawn_one_by_one(letters: str) -> tuple[Context, list[int]]:
    """The text of a tokenizer, to which a token for each letter was added; and these."""
    context = Context(tokenization("gpt2"), PROMPT, 1000)
    ids = [tokenization("gpt2").vocabulary.ids_of(Letters(letter))[0] for letter in letters]
    for token in ids:
        context.append(token)
    return context, ids


def output(context: Context) -> list[int]:
    return list(context.ids[head_of("gpt2") :])


@given(name=st.sampled_from(KINDS), text=words, more=words, at=st.integers(0, 60), token=st.integers(60, 300))
def test_ids_always_have_the_letters_of_the_text(name, text, more, at, token):
    context = Context(tokenization(name), PROMPT, 1000)
    context.rewind(0, text)
    context.append(token)
    drafted = Letters(text + tokenization(name).letters_of((token,)))
    assert written(context, name, head_of(name)) == drafted
    at = min(at, len(drafted))
    context.rewind(at, more)
    assert written(context, name, head_of(name)) == drafted[:at] + more
    assert context.offset == at + len(more)


@given(name=st.sampled_from(KINDS), text=words, more=words)
def test_text_that_comes_in_two_parts_is_tokenized_like_one(name, text, more):
    at_once, in_parts = (Context(tokenization(name), PROMPT, 1000) for _ in range(2))
    at_once.rewind(0, Letters(text + more))
    in_parts.rewind(0, text)
    in_parts.rewind(len(text), more)
    assert in_parts.ids == at_once.ids


def test_own_tokens_are_kept_as_they_were_drawn():
    context, ids = drawn_one_by_one("ab c")
    context.rewind(4, Letters(""))
    assert output(context) == ids
    context.rewind(3, Letters(""))
    assert output(context) == ids[:3]


def test_new_letters_are_tokenized_with_the_word_that_they_go_on_with_and_no_further():
    context, drawn = drawn_one_by_one(" abc the")
    context.rewind(8, Letters("re was"))
    assert output(context)[:4] == drawn[:4]
    assert tuple(output(context)[4:]) == tokenization("gpt2").encode_continuation(Letters(" there was"))


def test_of_a_text_without_words_only_the_latest_letters_are_tokenized_again():
    context, drawn = drawn_one_by_one("abcdefgh" * 20)
    context.rewind(len(drawn), Letters("i"))
    assert output(context)[: len(drawn) - MOST_AGAIN] == drawn[:-MOST_AGAIN]
    assert written(context, "gpt2", head_of("gpt2")) == "abcdefgh" * 20 + "i"


@given(st.lists(st.tuples(st.integers(0, 60), mixed.map("".join), st.booleans()), max_size=6))
def test_what_has_no_token_is_left_out_and_what_comes_after_it_is_not(steps):
    name, text = "small_unigram", ""
    context = Context(tokenization(name), PROMPT, 1000)
    token = kind(name).vocabulary(Side.DRAFTER).ids_of(Letters(" the"))[0]
    for at, more, drawn in steps:
        at = min(at, len(text))
        text = text[:at] + more
        context.rewind(at, Letters(more))
        assert written(context, name, head_of(name)) == "".join(filter(str.isascii, text))
        if drawn:
            context.append(token)
            text += " the"
    assert context.letters(0, context.offset) == text


def test_a_template_that_needs_an_id_beyond_the_rows_does_without_it() -> None:
    some = kind("llama2")
    narrow = Vocabulary.build(some.json, some.id_of("<tool_call>"), some.controls, [], Side.DRAFTER)
    text = b"<s>user\nHello<tool_call>there"
    context = Context(Tokenization(some.json, narrow), from_bytes(text), 36, templated=True)
    assert Tokenization(some.json, narrow).letters_of(context.ids).endswith("user\nHello there")


def test_the_end_of_a_sequence_is_a_letter_like_any_other():
    context = Context(tokenization("gpt2"), PROMPT, 1000)
    context.rewind(0, Letters(" the" + ControlRole.END_OF_SEQUENCE.letter + " dog"))
    assert written(context, "gpt2", head_of("gpt2")) == " the" + ControlRole.END_OF_SEQUENCE.letter + " dog"


@pytest.mark.parametrize("name", KINDS)
def test_a_text_that_is_too_long_is_cut_at_a_word_and_seldom(name):
    capacity, count, cuts = 40, 4, 0
    context = Context(tokenization(name), PROMPT, capacity)
    text, before = "", ()
    for turn in range(80):
        context.rewind(len(text), Letters(f" dog {turn}"))
        text += f" dog {turn}"
        context.fit(count)
        ids = context.ids
        assert len(ids) + count - 1 <= capacity
        kept = tokenization(name).letters_of(ids).removeprefix(ControlRole.BEGIN_OF_SEQUENCE.letter).lstrip(" ")
        assert (PROMPT + text).endswith(kept)
        assert (PROMPT + text)[: -len(kept)][-1:] in ("", " ")
        cuts += bool(before) and ids[: len(before) - 3] != before[: len(before) - 3]
        before = ids
    assert 5 < cuts < 40


def test_a_cut_keeps_three_quarters_of_the_room():
    context = Context(tokenization("gpt2"), Letters(" dog the" * 200), 100)
    context.fit(5)
    assert 55 <= len(context.ids) <= 72


def test_a_text_without_words_is_cut_between_characters():
    context = Context(tokenization("gpt2"), from_bytes("好中国".encode() * 100), 30)
    context.fit(4)
    assert 5 <= len(context.ids) <= 27
    first = tokenization("gpt2").letters_of(context.ids)[0]
    assert not 0x80 <= ord(first) < 0xC0


def test_what_was_cut_away_comes_back_when_it_is_needed_again():
    context = Context(tokenization("gpt2"), PROMPT, 40)
    context.rewind(0, Letters(" dog" * 60))
    context.fit(4)
    context.rewind(8, Letters(" the"))
    context.fit(4)
    whole = Context(tokenization("gpt2"), PROMPT, 40)
    whole.rewind(0, Letters(" dog dog the"))
    assert context.ids == whole.ids


@pytest.mark.parametrize("count", [10, 11, 12, 1000, 2**32 - 1])
def test_where_nothing_fits_there_is_no_room_and_without_text_nothing_to_go_on_with(count):
    for text, tokens, complaint in ((" the dog" * 10, count, "a context of 10 tokens has no room"), ("", 1, "no text")):
        with pytest.raises(NoRoomError, match=complaint):
            Context(tokenization("gpt2"), Letters(text), 10).fit(tokens)


def test_a_prompt_of_the_drafters_own_template_names_special_tokens() -> None:
    """No begin symbol is put before it, and what they are is not lost when the text is cut."""
    one = tokenization("llama2")
    text = "<s>user\nHello there, how are you?</s>\n<|fill_in|>assistant\n"
    context = Context(one, from_bytes(text.encode()), 36, templated=True)
    reference = Tokenizer.from_str(kind("llama2").json).encode(text, add_special_tokens=False).ids
    assert context.ids == tuple(reference)
    context.rewind(0, from_bytes(b"Very well"))
    assert one.letters_of(context.ids[len(reference) :]) == "Very well"
    assert context.fit(2)
    assert len(context.ids) < len(reference)
    assert kind("llama2").id_of("<|fill_in|>") in context.ids
