"""`crossdraft bench verification`: made-up models, and what is summed up."""

import json
from pathlib import Path

import pytest

from crossdraft.bench.made_up import Language, tokenization
from crossdraft.text.letters import Letters, Side
from crossdraft.text.pairs import Pair
from tests.cli.conftest import Cli

SIZE = 3000


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Two made-up vocabularies."""
    target, drafter = (tokenization(SIZE, side).vocabulary for side in Side)
    return Pair(target, drafter)


def test_every_method_is_measured(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    methods = ("standard", "union", "rdk", "coupled", "seeded")
    options = [part for name in methods for part in ("--method", name)]
    outcome = cli(
        "bench", "verification", *options, "--size", SIZE, "--rounds", 20, "-k", 3, "--width", 32, "--json", out
    )
    assert outcome.code == 0, outcome.err
    costs = json.loads(out.read_text())["costs"]
    assert [cost["method"] for cost in costs] == list(methods)
    for cost in costs:
        assert cost["rounds"] >= 20
        assert 0 < cost["median_ms"] <= cost["p90_ms"]
        assert 0.2 < cost["acceptance"] < 1
        assert cost["tokens_per_pass"] > 1
        assert (cost["k"], cost["width"]) == (3, 32)
    assert all(name in outcome.out for name in methods)
    assert outcome.err.startswith("left out: ")
    assert "slrs" in outcome.err
    assert "standard" not in outcome.err


@pytest.mark.parametrize(("name", "said"), [("slrs", "leave it out"), ("unheard-of", "unknown method")])
def test_methods_that_cannot_be_measured_are_refused(cli: Cli, name: str, said: str) -> None:
    outcome = cli("bench", "verification", "--method", name)
    assert outcome.code == 2
    assert said in outcome.err


def test_made_up_tokenizers_write_their_own_tokens_and_share_some(pair: Pair) -> None:
    tokens = tokenization(SIZE, Side.TARGET)
    text = Letters(" the tea is hot ")
    assert tokens.letters_of(tokens.encode_continuation(text)) == text
    assert pair.target.size == pair.drafter.size == len(set(pair.target.letters)) == SIZE
    assert 0.5 < len(pair.shared_drafter_ids) / SIZE < 0.95


def test_both_models_expect_the_same_text(pair: Pair) -> None:
    language = Language(pair, 0.5)
    text = Letters("once upon")
    expected = language.expected(text, 12)
    assert language.expected(Letters(text + expected[:5]), 7) == expected[5:]
    likely = language.target_row(text, 4, pair.shared_drafter_ids[:0])
    assert expected.startswith(pair.target.letters[likely.ids[0]])
    assert 0 < likely.tail < 1
    assert language.drafter_row(text, 4, shared=True, redistributed=False).whole
