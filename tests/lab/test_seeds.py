"""The tables of the pages about the papers: their stamps, the limit, and what they are counted from."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import linprog

from crossdraft.cli.measuring import repeats
from crossdraft.lab import stamps
from crossdraft.lab.limit import Text, first_token, tokens_per_pass
from crossdraft.lab.seeds import TABLES
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.verification.methods import COUPLED, SLEM, UNION
from tests.verification.enumerating import distribution_of
from tests.verification.toys import NAMED, Setup, Toy

DOCS = Path(__file__).parents[2] / "docs"


def test_every_table_has_its_place_and_every_place_its_table() -> None:
    found = {name: path.name for path in DOCS.glob("*.md") for name, *_ in stamps.TABLE.findall(path.read_text())}
    assert found == {name: one.page for name, one in TABLES.items()}


def test_a_table_whose_weights_have_changed_is_named(tmp_path: Path) -> None:
    page = tmp_path / "some.md"
    page.write_text("A\n<!-- bench seeds one: none -->\n\nold\n\n<!-- end -->\nB\n")
    stamp = stamps.stamp_of("2026-01-01", ["drafter-b"], ["qwen-2 00000000"])
    page.write_text(stamps.replaced(page.read_text(), "one", stamp, "| new |"))
    assert "old" not in page.read_text()
    assert list(stamps.outdated(tmp_path)) == []
    now = stamps.digest_of("drafter-b")
    page.write_text(page.read_text().replace(now, "01234567"))
    (fault,) = stamps.outdated(tmp_path)
    assert "one was measured with drafter-b 01234567" in fault
    with pytest.raises(ValueError, match="no page has"):
        stamps.replaced(page.read_text(), "two", stamp, "")


# The limit: no exact method exceeds it, and where one is known to reach it, it does.


def transported(targets: dict[tuple[str, ...], float], drafts: dict[str, float]) -> float:
    """Max E[tokens within the draft's text] over all couplings, by linear programming.

    Args:
        targets: probability by the letters of an output's tokens; none ends within a draft.
        drafts: probability by text.
    """

    gains = np.array([[_within(tokens, text) for text in drafts] for tokens in targets])
    rows, columns = gains.shape
    sums = [sparse.kron(sparse.eye(rows), np.ones((1, columns))), sparse.kron(np.ones((1, rows)), sparse.eye(columns))]
    bounds = [*targets.values(), *drafts.values()]
    found = linprog(-gains.ravel(), A_eq=np.vstack([one.toarray() for one in sums]), b_eq=bounds, method="highs")
    return -float(found.fun)


def _within(tokens: tuple[str, ...], text: str) -> int:
    ends = ["".join(tokens[: count + 1]) for count in range(len(tokens))]
    return sum(text.startswith(end) for end in ends)


def laws(toy: Toy, k: int) -> tuple[dict[tuple[str, ...], float], dict[str, float]]:
    """Outputs of k + 1 tokens by their letters, and the texts of drafts of k tokens."""
    setup = Setup(toy, UNION, k, k + 1, ignore_end=True)
    target, drafter = setup.target(None), laws_of_drafts(toy, k)
    outputs: dict[tuple[str, ...], float] = {}
    paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(k + 1):
        paths = [
            ((*path, token), mass * float(chance))
            for path, mass in paths
            for token, chance in enumerate(target.distribution(path))
        ]
    for path, mass in paths:
        letters = tuple(toy.target[token] for token in path)
        outputs[letters] = outputs.get(letters, 0.0) + mass
    return outputs, drafter


def laws_of_drafts(toy: Toy, k: int) -> dict[str, float]:
    from tests.tables import pseudo_distribution

    found = {NOTHING: 1.0}
    for _ in range(k):
        longer: dict[Letters, float] = {}
        for text, mass in found.items():
            for letters, chance in zip(
                toy.drafter, pseudo_distribution("drafter", text, len(toy.drafter)), strict=True
            ):
                whole = Letters(text + letters)
                longer[whole] = longer.get(whole, 0.0) + mass * float(chance)
        found = longer
    return {str(text): mass for text, mass in found.items()}


@pytest.mark.parametrize("name", ["same", "nested prefixes", "prefixes of one another", "one inside the other"])
def test_no_exact_method_accepts_more_than_optimal_transport(name: str) -> None:
    toy = NAMED[name]
    outputs, drafts = laws(toy, 1)
    limit = transported(outputs, drafts)
    p: dict[Letters, float] = {}
    for tokens, mass in outputs.items():
        p[Letters(tokens[0])] = p.get(Letters(tokens[0]), 0.0) + mass
    first = first_token(p, {Letters(text): mass for text, mass in drafts.items()})
    assert first <= limit + 1e-9
    for method in (UNION, COUPLED, SLEM):
        assert accepted(Setup(toy, method, 1, 2, ignore_end=True)) <= limit + 1e-9, method.name
    if name == "same":  # one token, one vocabulary: rejection sampling is the maximal coupling
        assert accepted(Setup(toy, COUPLED, 1, 2, ignore_end=True)) == pytest.approx(limit, abs=1e-9)
        assert first == pytest.approx(limit, abs=1e-9)


def accepted(setup: Setup) -> float:
    """Tokens of the first round that lie within the draft, in expectation."""
    from crossdraft.types.statistics import Kind

    def run(chooser: object) -> int:
        kinds = [(one.epoch, one.kind) for one in setup.emitted(chooser)]  # type: ignore[arg-type]
        return sum(kind is Kind.ACCEPTED for epoch, kind in kinds if epoch == kinds[0][0])

    return sum(count * chance for count, chance in distribution_of(run).items())


def test_longer_tokens_are_served_first() -> None:
    """All texts begin with a: a token that only some of them have must not find them given away."""
    p = {Letters("a"): 0.5, Letters("ab"): 0.5}
    assert first_token(p, {Letters("ab"): 0.5, Letters("ac"): 0.5}) == pytest.approx(1.0)
    assert first_token(p, {Letters("ac"): 1.0}) == pytest.approx(0.5)
    assert first_token({Letters("b"): 1.0}, {Letters("a"): 1.0}) == 0.0


def test_a_bound_of_rounds_by_what_was_drawn() -> None:
    text = Text(NOTHING, (Letters("a"), Letters("ab")), (0.5, 0.1))
    chances = [np.array([0.25, 0.2]), np.array([1.0, 0.0])]
    assert tokens_per_pass([text, text], chances)[0] == pytest.approx(1 + (0.5 + 1 + 1 + 0) / 2)
    assert tokens_per_pass([text, text], chances, drafts=2)[0] == pytest.approx(1 + (1 + 1 + 1 + 0) / 2)


def test_outputs_that_repeat_themselves() -> None:
    assert repeats([1, 2, 3, 4] * 8)
    assert not repeats(list(range(32)))
    assert not repeats([])


def test_ranks_of_js_tiktoken() -> None:
    made = run_path(str(DOCS.parent / ".ci/vocabularies.py"))["_of_js_tiktoken"]
    assert made(b'export default {"bpe_ranks":"! 0 IQ== Ig==\\n! 7 Iw=="};').split(b"\n") == [
        b"IQ== 0",
        b"Ig== 1",
        b"Iw== 7",
    ]
