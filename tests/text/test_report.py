"""The compatibility report of a pair."""

import json
from dataclasses import asdict
from math import log10

import pytest

from crossdraft.text import report as report_module
from crossdraft.text.letters import Letters, Side, is_plain
from crossdraft.text.report import RANDOM_STRINGS, CompatibilityReport, Compositions, Pieces, combinations_of, compare
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from tests.text.kinds import CORPUS, kind

SAMPLE = "\n".join(CORPUS[:5])


def _compare(target: str, drafter: str) -> CompatibilityReport:
    return compare(kind(target).tokenization(), kind(drafter).tokenization(Side.DRAFTER), SAMPLE)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "unigram"])
def test_a_tokenizer_has_the_same_vocabulary_as_itself(name: str) -> None:
    report = _compare(name, name)
    assert report.same_vocabulary
    assert all(check.same and not check.detail for check in report.checks)
    assert report.shared_of_target == report.shared_of_drafter == 1.0
    assert report.sample.target_tokens == report.sample.drafter_tokens == report.sample.shared_of_target == 1.0
    assert report.target_written_by_drafter == report.drafter_written_by_target == 1.0


def test_each_difference_is_named() -> None:
    gpt2 = kind("gpt2")
    ours, plain = gpt2.vocabulary(), json.loads(gpt2.json)
    model, vocabulary = plain["model"], plain["model"]["vocab"]
    swapped = vocabulary | {"l": vocabulary["H"], "H": vocabulary["l"]}
    for described, rows, failing in (
        (json.dumps(plain | {"model": model | {"vocab": swapped}}), 0, {"id map", "encodings", "decodings"}),
        (json.dumps(plain | {"model": model | {"merges": []}}), 0, {"encodings"}),
        (gpt2.json.replace("<|fill_in|>", "<|hole|>"), 0, {"id map", "special tokens"}),
        (gpt2.json, 1, {"size", "special tokens"}),  # a padding row more
    ):
        theirs = Vocabulary.build(described, gpt2.size + rows, ours.controls, ours.stops, Side.DRAFTER)
        report = compare(gpt2.tokenization(), Tokenization(described, theirs), SAMPLE)
        assert {check.name for check in report.checks if not check.same} == failing
        assert report.same_vocabulary == ("id map" not in failing)


def written(name: str, side: Side) -> list[Letters]:
    """The sample's tokens that are text."""
    tokenization = kind(name).tokenization(side)
    found = [tokenization.vocabulary.letters[token] for token in tokenization.encode_prompt(SAMPLE)]
    return [letters for letters in found if is_plain(letters)]


def test_what_two_kinds_share_is_counted() -> None:
    report = _compare("llama3", "llama2")
    target = set(kind("llama3").vocabulary().letters)
    drafter = set(kind("llama2").vocabulary(Side.DRAFTER).letters)
    assert (report.shared, report.shared_of_target) == (len(target & drafter), report.shared / report.target_strings)
    ours, theirs = set(written("llama3", Side.TARGET)), set(written("llama2", Side.DRAFTER))
    assert report.sample.shared_kinds == len(ours & theirs)
    assert report.sample.shared_of_target == len(ours & theirs) / len(ours)
    tokens = written("llama3", Side.TARGET)
    assert 0 < report.sample.target_tokens == sum(token in drafter for token in tokens) / len(tokens) < 1
    assert json.loads(json.dumps(asdict(report)))["shared"] == report.shared


def test_what_a_vocabulary_cannot_write_and_a_normalizer_changes_is_named() -> None:
    report = _compare("llama2", "lowercase")
    assert report.target_injectivity.holds
    assert not report.drafter_injectivity.holds
    assert report.drafter_injectivity.lossy_parts == ("NFKC", "Lowercase")
    assert report.drafter_injectivity.example
    report = _compare("llama2", "small_unigram")
    assert report.target_written_by_drafter < 1.0 == report.drafter_written_by_target
    assert not report.drafter_injectivity.holds


@pytest.mark.parametrize(
    ("pieces", "string", "expected"),
    [
        (("a", "bc"), "ab", Compositions(0, 0, 2)),  # the last piece may go beyond
        (("abc",), "ab", Compositions(0, 0, 1)),
        (("a", "ab"), "aab", Compositions(1, 2, 2)),
        (("a",), "b", Compositions(0, 0, 0)),
        (("a", "aa"), "aaa", Compositions(3, 4, 3)),
        (("hello_", "world", "wo", "rld"), "hello_world", Compositions(2, 3, 3)),  # the paper's example
        (tuple(" " * length for length in range(1, 101)), " " * 100, Compositions(2**99, 2**99, 100)),  # beyond 64 bits
    ],
)
def test_compositions(pieces: tuple[str, ...], string: str, expected: Compositions) -> None:
    assert Pieces([Letters(piece) for piece in pieces]).compositions(Letters(string)) == expected


def test_combinations_of_short_tokens_only() -> None:
    """`forwards` are of the same tokens; what the other can write, and how far to look ahead, is of all."""
    target, drafter = kind("llama3").tokenization(Side.TARGET), kind("gpt2").tokenization(Side.DRAFTER)
    every, short = compare(target, drafter, SAMPLE), compare(target, drafter, SAMPLE, longest=3)
    assert [length for length, *_ in short.by_length] == [1, 2, 3]
    assert short.by_length == every.by_length[:3]
    assert short.combinations.tokens == sum(tokens for _, tokens, *_ in short.by_length) < every.combinations.tokens
    assert short.forwards.tokens == short.combinations.tokens
    assert short.by_length[0][2:] == (1.0, 1.0)  # a byte: one way, and one row says its probability
    assert (short.look_ahead, short.target_written_by_drafter) == (every.look_ahead, every.target_written_by_drafter)


def test_decoding_is_another_question_than_the_letters() -> None:
    """A tokenizer that lower-cases restores neither; one that puts a blank before a text restores its letters only."""
    found = _compare("lowercase", "llama2")
    assert not found.target_decoding.holds
    assert found.target_decoding.strings > RANDOM_STRINGS
    assert found.drafter_injectivity.holds
    assert report_module.decoding(kind("gpt2").tokenization(Side.TARGET), "def f(x):\n    return x\n").holds


def test_statistics_of_combinations() -> None:
    found = combinations_of([1, 2, 1, 4, 0, 2**2000])
    assert (found.tokens, found.quartiles) == (5, (1, 2, 4))
    assert found.log10_of_largest == pytest.approx(2000 * log10(2))
    assert found.log10_of_mean == pytest.approx(2000 * log10(2) - log10(5))
    assert found.log10_of_deviation == pytest.approx(2000 * log10(2) + log10(0.4))  # √(1/5 − 1/25)
    json.dumps(asdict(found))
    assert (combinations_of([0]).tokens, combinations_of([2, 2]).log10_of_deviation) == (0, 0)
    assert report_module.quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_what_a_tokenizer_writes_as_unknown_is_named() -> None:
    """It has no letters, so that no drafter can write it."""
    small, whole = kind("small_unigram").tokenization(), kind("qwen").tokenization(Side.DRAFTER)
    report = compare(small, whole, "the Ω dog Ω\n")
    assert report.target_unknown[0] == "Ω"
    assert len(report.target_unknown) == len({*report.target_unknown}) > 3
    assert report.drafter_unknown == compare(whole, small, "the").target_unknown == ()
