"""Ids, letters and text, for every kind of tokenizer."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from crossdraft.text import tokenization as tokenization_module
from crossdraft.text.letters import ControlRole, Letters, Side, from_bytes, is_plain, to_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import LetterDecoder, NotExpressible, Tokenization, last_word_boundary, segments_of
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.methods import METHODS
from crossdraft.verification.planning import Planner
from tests.conftest import FULL
from tests.text.kinds import LOSSY, PADDING, TOOL, Kind, kind

END = ControlRole.END_OF_SEQUENCE.letter
SNIPPETS = (
    *("the", " the", "there", "n't", "'", "'re", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "1", "1000", "0"),
    *("!", ".", "()", "naïve", "naï", "<tool_call>", "<tool", "_call>", "</s>", "<s>", "<|im_end|>", "<unk>", "<0x41>"),
    *("▁", "▁▁", "Ġ", "ÿ", "é", "e\u0301", "你好", "世界", "🦄", "🚀", "ﬁ", "İ", "\u200d", "\ufeff", "\x00"),
    *("aaaa", "abab", "print(", "<|fill_in|>", ":", ".\n", "//", "<mask>", " <think> ", "<|user|> "),
)
texts = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), max_size=12).map("".join)
controls = st.sampled_from([ControlRole.BEGIN_OF_SEQUENCE.letter, ControlRole.END_OF_SEQUENCE.letter])
letters = st.lists(
    st.one_of(texts.map(lambda text: from_bytes(text.encode())), st.binary(max_size=5).map(from_bytes), controls),
    max_size=6,
).map(lambda parts: Letters("".join(parts)))
few = settings(max_examples=60 if FULL else 20)  # more of them with `make test-full`


@cache
def _of_transformers(some: Kind) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(some.json))


@few
@given(letters)
def test_a_continuation_has_the_letters_it_was_made_of(injective: Tokenization, given_letters: Letters) -> None:
    assert injective.letters_of(injective.encode_continuation(given_letters)) == given_letters


@few
@given(texts)
def test_a_prompt_is_what_transformers_makes_of_it(any_kind: Kind, text: str) -> None:
    assert list(any_kind.tokenization().encode_prompt(text)) == _of_transformers(any_kind)(text).input_ids


@few
@given(st.lists(st.sampled_from(["the", " dog", "'s ", "\n", "世界", "🦄", "é", "1001", " ", "</s>"])).map("".join))
def test_the_letters_of_a_prompt_make_the_same_prompt(injective: Tokenization, text: str) -> None:
    ids = injective.encode_prompt(text)
    assert injective.encode_prompt_letters(injective.letters_of(ids)) == ids


def test_words_in_the_middle_of_an_output_are_whole_tokens(injective: Tokenization) -> None:
    vocabulary = injective.vocabulary
    parts = [letters for letters in vocabulary.letters if len(letters) > 1 and letters.isascii() and letters.isalpha()]
    whole = [part for part in parts if injective.encode_continuation(part) == vocabulary.ids_of(part)]
    assert len(whole) > len(parts) / 2


def test_a_continuation_has_no_prefix_space_no_begin_symbol_and_no_special_token_that_is_typed() -> None:
    some, end = kind("llama2"), ControlRole.END_OF_SEQUENCE.letter
    tokenization = some.tokenization()
    written = [tokenization.encode_prompt("the</s>"), tokenization.encode_continuation(from_bytes(b"the</s>"))]
    whole = [ControlRole.BEGIN_OF_SEQUENCE.letter + " the" + end, "the</s>"]
    assert [tokenization.letters_of(ids) for ids in written] == whole
    assert tokenization.encode_continuation(end) == (some.id_of("</s>"),)


def test_an_added_token_that_is_text_is_one_token(any_kind: Kind) -> None:
    tokenization = any_kind.tokenization()
    assert tokenization.encode_continuation(from_bytes(b"<tool_call>")) == (any_kind.id_of("<tool_call>"),)
    assert tokenization.vocabulary.letters[any_kind.id_of("<tool_call>")] == "<tool_call>"


def test_what_cannot_be_written_is_named() -> None:
    tokenization = kind("gpt2").tokenization()
    with pytest.raises(NotExpressible, match="control symbol U\\+E001") as caught:
        tokenization.encode_continuation(Letters("a" + ControlRole.END_OF_TURN.letter))
    assert caught.value.letters == ControlRole.END_OF_TURN.letter
    with pytest.raises(NotExpressible, match="byte 0xFF"):
        kind("small_unigram").tokenization().encode_continuation(from_bytes(b"the \xff"))


def test_a_drafters_prompt_leaves_out_what_it_cannot_write() -> None:
    tokenization = kind("llama2").tokenization(Side.DRAFTER)
    prompt = Letters(ControlRole.BEGIN_OF_SEQUENCE.letter + "the" + Side.TARGET.control(0) + " dog")
    ids = tokenization.encode_prompt_letters(prompt)
    assert tokenization.letters_of(ids) == ControlRole.BEGIN_OF_SEQUENCE.letter + " the dog"


def test_an_added_token_takes_the_blanks_beside_it_in_a_prompt_but_not_in_an_output() -> None:
    some, text = kind("neox"), "the  <think>\nthe <mask> the"
    tokenization, thinks, mask = some.tokenization(), some.id_of("<think>"), some.id_of("<mask>")
    prompt, output = tokenization.encode_prompt(text), tokenization.encode_continuation(from_bytes(text.encode()))
    assert tokenization.shown(prompt) == "the<think>the<mask>the"
    assert {thinks, mask} <= {*prompt}
    assert thinks in output
    assert mask not in output
    assert tokenization.letters_of(output) == text


@pytest.mark.parametrize(
    ("name", "begun", "after_symbol"),
    [("mistral", " the", "dog"), ("legacy_mistral", " the", " dog"), ("unprefixed", "the", "dog")],
)
def test_where_metaspace_puts_spaces(name: str, begun: str, after_symbol: str) -> None:
    tokenization = kind(name).tokenization()
    assert tokenization.letters_of(tokenization.encode_prompt("the</s>dog")[1:]) == begun + END + after_symbol
    assert tokenization.letters_of(tokenization.encode_continuation(Letters(f"the{END}dog"))) == f"the{END}dog"
    drafter = kind(name).tokenization(Side.DRAFTER)
    assert drafter.letters_of(drafter.encode_prompt_letters(from_bytes(b"the"))[1:]) == begun


@few
@given(texts, st.integers(0, 60))
@example(".\n<unk>", 2)
def test_what_comes_before_a_word_boundary_is_tokenized_by_itself(injective: Tokenization, text: str, before: int):
    whole = from_bytes(text.encode())
    boundary = last_word_boundary(whole, before)
    parts = (Letters(whole[:boundary]), Letters(whole[boundary:]))
    first, second = map(injective.encode_continuation, parts)
    assert first + second == injective.encode_continuation(whole)


@few
@given(letters)
def test_a_drafters_prompt_is_never_refused(any_kind: Kind, given_letters: Letters) -> None:
    tokenization = any_kind.tokenization(Side.DRAFTER)
    ids = tokenization.encode_prompt_letters(Letters(given_letters + Side.TARGET.control(7)))
    assert all(0 <= token < any_kind.size - PADDING for token in ids)


@few
@given(texts)
def test_a_lossy_tokenizer_changes_text_but_refuses_none(lossy: Tokenization, text: str) -> None:
    assert lossy.lossy
    once = lossy.letters_of(lossy.encode_continuation(from_bytes(text.encode())))
    assert all(ord(letter) < 256 for letter in once)


def narrow(name: str, side: Side = Side.TARGET) -> Tokenization:
    """Of a model whose rows end before the tokenizer's last added tokens."""
    some = kind(name)
    return Tokenization(some.json, Vocabulary.build(some.json, some.id_of(TOOL), some.controls, [], side))


def test_an_id_beyond_the_rows_of_the_model_is_explained() -> None:
    some = kind("gpt2")
    few_rows = Tokenization(some.json, Vocabulary.build(some.json, 300, [], [], Side.TARGET))
    with pytest.raises(ValueError, match="rows have 300 ids"):
        few_rows.encode_prompt("there was nothing there")
    said = from_bytes(b"there was nothing there")  # what is drafted is written with the tokens that have rows
    assert few_rows.letters_of(few_rows.encode_continuation(said)) == said


@pytest.mark.parametrize("name", ["gpt2", "llama2", "unigram", "composed"])
def test_an_added_token_beyond_the_rows_is_text_in_an_output_and_refused_in_a_prompt(name: str) -> None:
    some, tokenization, text = kind(name), narrow(name), f"the {TOOL} dog, naïve"
    said = from_bytes(text.encode())
    assert tokenization.letters_of(tokenization.encode_continuation(said)) == said
    with pytest.raises(ValueError, match=f"has '{TOOL}', which is id {some.id_of(TOOL)} of the tokenizer, and the"):
        tokenization.encode_prompt(text)
    assert max(tokenization.encode_prompt(text, leave_out=True)) < tokenization.vocabulary.size


def _without_unknown() -> Tokenization:
    """It has no token for most texts, not even an unknown one."""
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -1.5), ("ab", -2.0)]))
    tokenizer.decoder = decoders.Fuse()
    json = tokenizer.to_str()
    return Tokenization(json, Vocabulary.build(json, 3, [], [], Side.TARGET))


def _panicking() -> Tokenization:
    """The library panics where a text has other than ASCII, as of an added token nothing is left."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Replace("x", ""), decoders.Fuse()
    tokenizer.add_tokens([AddedToken("x")])
    json = tokenizer.to_str()
    return Tokenization(json, Vocabulary.build(json, 3, [], [], Side.TARGET))


@pytest.mark.parametrize(("make", "text"), [(_without_unknown, "abc"), (_panicking, "abé")])
def test_a_text_that_the_tokenizer_itself_refuses_is_refused_in_words(make, text) -> None:
    tokenization = make()
    with pytest.raises(ValueError, match="the tokenizer cannot read this text"):
        tokenization.encode_prompt(text)
    said = from_bytes(("aab" + text[2:] * 3000 + "b").encode())
    assert tokenization.letters_of(tokenization.encode_continuation(said, leave_out=True)) == "aabb"


def test_a_long_run_of_what_cannot_be_written_is_left_out() -> None:
    """Some tokenizers make one unknown token of all of it."""
    run = from_bytes(("the " + "Ω" * 5000 + " dog").encode())
    tokenization = kind("small_unigram").tokenization()
    assert tokenization.letters_of(tokenization.encode_continuation(run, leave_out=True)) == "the  dog"


TARGETS: dict[str, Callable[[], Tokenization]] = {
    **{name: partial(Kind.tokenization, kind(name)) for name in ("qwen", "llama2", "mistral", *LOSSY, "small_unigram")},
    **{f"narrow {name}": partial(narrow, name) for name in ("gpt2", "llama2", "unigram", "lowercase")},
    "without unknown": _without_unknown,
}
any_control = st.sampled_from([Letters(side.control(rank)) for side in Side for rank in (0, 3, 60_000)])
anything = st.lists(st.one_of(letters, any_control), max_size=4).map(lambda parts: Letters("".join(parts)))


@cache
def planned_for(name: str, drafter: str) -> tuple[Tokenization, Pair]:
    tokenization = TARGETS[name]()
    return tokenization, Pair(tokenization.vocabulary, kind(drafter).vocabulary(Side.DRAFTER))


@few
@given(name=st.sampled_from(list(TARGETS)), said=anything)
def test_whatever_is_said_ends_at_worst_what_is_guessed_of_it(name: str, said: Letters) -> None:
    tokenization = TARGETS[name]()
    ids = tokenization_module.encode_beginning(tokenization.encode_continuation, said)
    assert all(0 <= token < tokenization.vocabulary.size for token in ids)
    kept = tokenization.encode_continuation(said, leave_out=True)
    assert all(0 <= token < tokenization.vocabulary.size for token in kept)
    if not tokenization.lossy:
        assert said.startswith(tokenization.letters_of(ids))


@few
@given(
    name=st.sampled_from(list(TARGETS)),
    drafter=st.sampled_from(["gpt2", "llama2", "small_unigram", "lowercase"]),
    method=st.sampled_from(list(METHODS)),
    ids=st.lists(st.integers(0, 140), min_size=1, max_size=8),
    beside=st.lists(anything, max_size=2),
)
def test_a_pass_is_planned_for_whatever_is_drafted(name, drafter, method, ids, beside) -> None:
    tokenization, pair = planned_for(name, drafter)
    planner = Planner(pair, METHODS[method], tokenization.encode_continuation, budget=16)
    draft = [DraftToken(token, Row.certain(token)) for token in (*ids, pair.drafter.size - 1)]
    plan = planner.plan(draft, skip=0, room=16, alternatives=beside)
    assert all(0 <= token < pair.target.size for token in plan.tree.tokens)
    assert all(np.all(listed < pair.target.size) for listed in plan.listed)


def _of_words(decoder: decoders.Decoder | None) -> str:
    vocabulary = ["the", "dog", "a", "##s", "▁the", "in</w>", "_the", " x", "é", ".", " "]
    tokenizer = Tokenizer(models.WordLevel({piece: token for token, piece in enumerate(vocabulary)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer.to_str()


SPACES = decoders.Replace("▁", " ")
DECODERS: dict[str, tuple[decoders.Decoder | None, bool]] = {  # with whether tokens are texts that are joined
    "none": (None, False),
    "Fuse": (decoders.Fuse(), True),
    "WordPiece": (decoders.WordPiece(), False),
    "CTC": (decoders.CTC(), False),
    "BPEDecoder": (decoders.BPEDecoder(suffix="</w>"), False),
    "Metaspace": (decoders.Metaspace(replacement="_"), False),
    "Replace": (decoders.Replace(Regex("[aeiou]"), "o"), False),
    "Strip": (decoders.Strip(" ", 1, 0), False),
    "Sequence": (decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
    "Sequence of a Strip": (decoders.Sequence([SPACES, decoders.Strip(" ", 1, 0), decoders.Fuse()]), False),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_tokenizer_whose_decoder_does_not_join_its_tokens_is_refused_by_name(name: str) -> None:
    decoder, joins = DECODERS[name]
    json = _of_words(decoder).replace('"▁the"', '"▁the"' if name.startswith("Seq") else '"a_the"')
    vocabulary = Vocabulary.build(json, 11, [], [], Side.TARGET)
    if joins:
        assert Tokenization(json, vocabulary).shown([0, 1, 1]) == "thedogdog"
        return
    with pytest.raises(ValueError, match=rf"whose decoder \({name.split()[0]}\) does not join tokens"):
        Tokenization(json, vocabulary)


def test_a_bpe_tokenizer_without_a_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE({"t": 0, "h": 1, "th": 2}, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="'t' and 't' become 't t'"):
        Tokenization(tokenizer.to_str(), Vocabulary.build(tokenizer.to_str(), 3, [], [], Side.TARGET))


@cache
def whole_texts(some: Kind) -> list[int]:
    """Ids of the model's own pieces that are whole characters."""
    vocabulary = some.vocabulary()
    own = [token for token in range(some.id_of(some.nameless)) if is_plain(vocabulary.letters[token])]
    texts = {token: to_bytes(vocabulary.letters[token]).decode("utf-8", "replace") for token in own}
    return [token for token, text in texts.items() if "\ufffd" not in text and token not in vocabulary.fallback]


@few
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_letters_are_what_the_tokenizers_own_decoder_writes(any_kind: Kind, places: list[int]) -> None:
    tokenization, whole = any_kind.tokenization(), whole_texts(any_kind)
    first, *ids = (whole[place % len(whole)] for place in places)
    begun = tokenization.shown([first])
    assert tokenization.shown([first, *ids]) == begun + to_bytes(tokenization.letters_of(ids)).decode()


@given(letters, st.lists(st.integers(1, 4)))
def test_text_shown_in_pieces_is_the_text_shown_at_once(whole: Letters, lengths: list[int]) -> None:
    decoder, shown, rest = LetterDecoder(), "", whole
    assert decoder.feed(from_bytes(b"\xc3")) == ""  # held back
    assert decoder.flush() == "\ufffd"  # and given up: it begins anew
    for length in lengths:
        shown += decoder.feed(Letters(rest[:length]))
        rest = Letters(rest[length:])
    shown += decoder.feed(rest) + decoder.flush()
    assert shown == to_bytes(whole).decode("utf-8", "replace")


@given(letters)
def test_segments_join_to_the_letters(whole: Letters) -> None:
    segments = list(segments_of(whole, "▁"))
    assert "".join(run for run, _ in segments) == whole
    assert all(text is None or text.encode() == to_bytes(run) for run, text in segments)


@pytest.mark.parametrize(
    ("text", "before", "boundary"),
    [
        ("the lazy dog", 12, 8),
        ("the lazy dog", 8, 8),
        ("the lazy dog", 7, 3),
        ("the  lazy", 5, 3),
        ("the\n\nlazy", 99, 3),
        ("if the:\nlazy", 8, 8),  # a line break is one token with `:` in many vocabularies
        ("if the:\n    lazy", 8, 2),
        ("if the:\n\nlazy", 99, 2),
        ("if the:\n//", 8, 2),  # as is a slash after it
        (" the", 4, 0),
        ("the", 3, 0),
        ("", 0, 0),
        (f"the{END}lazy", 8, 4),
        (f"the{END}lazy", 3, 3),
    ],
)
def test_the_last_word_boundary(text: str, before: int, boundary: int) -> None:
    assert last_word_boundary(Letters(text), before) == boundary
