"""`crossdraft select`: the cost model by hand, and the command over services that run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.cli.select import CERTAIN, Candidate, Plain, Rounds, Selection, advice, best_of
from tests.cli.conftest import Cli
from tests.lab.conftest import figures

PLAIN = Plain(step_seconds=1.0, pass_seconds=0.8)
# Two of four draft tokens are accepted on average: 1/2 + 1/4 + 1/8 + 1/8 = 1 with the shares below.
ROUNDS = Rounds(
    k=4,
    tokens=2.0,
    passes=1.0,
    accepted_at=(0.5, 0.5, 0.5, 1.0),
    draft_token_seconds=0.1,
    pass_seconds=1.0,
    beside_seconds=0.2,
)
CANDIDATE = Candidate("bundled:b", "slem", 0.5, 0.1, 1.4, 3, {3: 1.2}, 1.25, 0.1, 12.5, 10.0)


def test_the_model_gives_what_was_measured_at_the_measured_number_of_draft_tokens() -> None:
    assert ROUNDS.tokens_with(4) == 2.0
    assert ROUNDS.seconds_with(4, PLAIN) == pytest.approx(1.0 + 4 * 0.1 + 0.2)
    assert ROUNDS.speed_with(4, PLAIN) == pytest.approx(2.0 / 1.6)


def test_fewer_draft_tokens_yield_less_and_cost_less() -> None:
    assert [ROUNDS.tokens_with(k) for k in (1, 2, 3)] == [1.5, 1.75, 1.875]
    assert ROUNDS.seconds_with(1, PLAIN) == pytest.approx(0.85 + 0.1 + 0.2)
    assert ROUNDS.best((1, 2, 3, 4), PLAIN) == 2  # 1.304, 1.346, 1.339, 1.25
    assert replace(ROUNDS, draft_token_seconds=1.0).best((1, 2, 3, 4), PLAIN) == 1
    assert replace(ROUNDS, draft_token_seconds=0.0).best((1, 2, 3, 4), PLAIN) == 4
    missing = replace(ROUNDS, passes=1.4)  # with row misses, which are fewer, too
    assert missing.seconds_with(4, PLAIN) == pytest.approx(1.4 * 1.0 + 4 * 0.1 + 0.2)
    assert missing.seconds_with(1, PLAIN) == pytest.approx(1.1 * 0.85 + 0.1 + 0.2)
    never_right = replace(ROUNDS, tokens=1.0, accepted_at=(0.0, 0.0, 0.0, 0.0))
    assert [never_right.tokens_with(k) for k in (1, 4)] == [1.0, 1.0]


def test_rounds_are_sums_over_generations() -> None:
    measured = [
        figures(epochs=4, tokens=8, passes=5, draft_tokens=8, drafter_seconds=0.8, target_seconds=1.0, wire_seconds=0.4)
        for _ in range(2)
    ]
    places = {"drafted_at": (4, 4), "judged_at": (4, 2), "accepted_at": (2, 1)}
    found = Rounds.of(2, [replace(one, **places) for one in measured])
    assert (found.tokens, found.passes, found.accepted_at) == (2.0, 1.25, (0.5, 0.5))
    assert (found.draft_token_seconds, found.pass_seconds, found.beside_seconds) == pytest.approx((0.1, 0.2, 0.1))
    plain = Plain.of([figures(tokens=10, passes=10, target_seconds=2.0, wire_seconds=0.5, verification_seconds=0.5)])
    assert (plain.step_seconds, plain.pass_seconds) == pytest.approx((0.3, 0.2))


def test_the_advice_is_the_fastest_one_if_it_is_faster_than_none_beyond_chance() -> None:
    slower = replace(CANDIDATE, method="tli", measured=1.1, error=0.05)
    assert best_of([slower, CANDIDATE]) == CANDIDATE
    assert advice([slower, CANDIDATE]).startswith("Use bundled:b with method slem and K = 3: 1.25 ± 0.10 times as fast")
    useless = [replace(slower, measured=0.7), replace(CANDIDATE, measured=0.9)]
    assert best_of(useless) is None
    assert "None helps" in advice(useless)
    assert "bundled:b with method slem and K = 3, is 0.90 ± 0.10 times as fast" in advice(useless)
    assert "measure more prompts" not in advice(useless)
    assert best_of([]) is None
    assert advice([]) == "None helps: no method can be used with these drafters."
    doubtful = replace(CANDIDATE, measured=1.29, error=0.5)
    said = advice([doubtful, replace(CANDIDATE, method="tli", measured=0.9)])
    assert best_of([doubtful]) is None
    assert said.startswith("None is shown to help: the best, bundled:b with method slem and K = 3, is 1.29 ± 0.50")
    assert "may be chance: measure more prompts (--limit)" in said


def test_a_drafter_that_copies_bytes_is_probed_with_more_draft_tokens() -> None:
    selection = Selection("t", ("d",), ("a", "b"), (), (), 0.0, 8)
    assert max(selection.ks_for(copies=False)) < 16 <= max(selection.ks_for(copies=True))
    assert replace(selection, ks=(2, 3)).ks_for(copies=True) == (2, 3)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox")))
    return path


def test_services_that_run_are_measured_and_the_fastest_is_named(
    cli: Cli, pair: tuple[str, ...], prompts_file: Path
) -> None:
    options = ("--method", "slem", "--method", "tli", "--method", "rdk", "-k", 1, "-k", 2, "--max-tokens", 6)
    outcome = cli("select", *pair, "--prompts", prompts_file, *options, "--json")
    assert outcome.code == 0, outcome.err
    (found,) = outcome.records
    assert [(one["drafter"], one["method"]) for one in found["candidates"]] == [(pair[3], "slem"), (pair[3], "tli")]
    for one in found["candidates"]:
        assert set(one["expected"]) == {"1", "2"}
        assert one["best_k"] == int(max(one["expected"], key=one["expected"].__getitem__))
        assert one["measured"] == pytest.approx(one["tokens_per_second"] / one["plain_tokens_per_second"])
        assert one["draft_cost"] > 0
    assert [one["method"] for one in found["skipped"]] == ["rdk"]
    faster = [one for one in found["candidates"] if one["measured"] - CERTAIN * one["error"] > 1]  # as times have it
    fastest = max(faster or found["candidates"], key=lambda one: one["measured"])
    assert f"with method {fastest['method']} " in found["advice"]
    assert (found["choice"] is None) == found["advice"].startswith("None ") == (not faster)


def test_a_table_for_people(cli: Cli, pair: tuple[str, ...], prompts_file: Path) -> None:
    options = ("--method", "seeded", "-k", 1, "--max-tokens", 4, "--temperature", 1)
    outcome = cli("select", *pair, "--prompts", prompts_file, *options)
    assert outcome.code == 0, outcome.err
    for part in ("draft/pass", "best K", "seeded", "None " if "None " in outcome.out else "Use "):
        assert part in outcome.out


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (("--prompts", "nowhere.jsonl"), 2, "cannot read the prompts"),
        (("--prompts", "broken.jsonl"), 2, "broken.jsonl, line 1 is no prompt"),
        (("--method", "guess"), 2, "unknown method 'guess'"),
        (("--target", "127.0.0.1:1", "--drafter", "127.0.0.1:1"), 1, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_said(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: int, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text("{\n")
    cli("select", *options).failed(complaint, code)
