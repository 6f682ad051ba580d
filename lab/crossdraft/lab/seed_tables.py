"""The tables of the pages about the papers, which `crossdraft bench seeds` makes; each returns Markdown."""

import ast
import inspect
import json
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from crossdraft.cli.corpus import NamedTokenizer
from crossdraft.cli.measuring import SEED, Setting, Table
from crossdraft.client import GenerationRequest
from crossdraft.drafter import scoring
from crossdraft.drafter.scoring import PrefixSums, SortedDistribution
from crossdraft.drafter.tree_drafting import Node, TreeDrafting
from crossdraft.engine.model_thread import Job
from crossdraft.engine.sampling.distributions import narrowed
from crossdraft.engine.sampling.sampler import TopRow
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab import limit
from crossdraft.lab.acceptance import AcceptanceBenchmark, MeasuredSetting, per_pass, without_repeats
from crossdraft.lab.seeds import REAL, TARGET, A, B, C, Seeds, table
from crossdraft.lab.services import pair_here
from crossdraft.lab.training.data import read_corpus
from crossdraft.text.affinity import load_affinity
from crossdraft.text.frequencies import read_frequencies
from crossdraft.text.letters import Letters, Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.report import Pieces, combinations_of, compare, decoding, plain_strings, quartiles, strings_of
from crossdraft.text.vocabulary import Trie
from crossdraft.types.rows import Ids, Probabilities
from crossdraft.verification.alignment import align

EAGLE = "bundled:drafter-eagle"
PAIR = ("target", "drafter-a", "drafter-b")
SHORTEST = 150_000  # tokens of Table 8
CUT = GenerationRequest.row_width  # ids of a draft token's row
NO_BAND = 10**6  # wider than any draft
STRETCH = 20  # draft tokens that are aligned
Rows = Callable[[list[tuple[int, ...]]], list[SortedDistribution]]  # after draft tokens


def percent(values: Sequence[float] | Probabilities, base: Sequence[float] | Probabilities = ()) -> str:
    """A mean of shares, and its difference to another one over the same places with that one's standard error."""
    if not np.size(base):
        return f"{np.mean(values):.1%}"
    difference = np.subtract(values, base)
    added = f" ({difference.mean():+.1%} ± {difference.std() / len(difference) ** 0.5:.1%})"
    return f"{np.mean(values):.1%}{added}"


def short(name: str) -> str:
    return name.removeprefix("bundled:drafter-").upper()


# Vocabularies: heterogeneous-vocabularies.md.

PUBLISHED = (  # target, drafter, |T∩D|, of T (2502.05202, Table 5); of T∪D, of the larger (TokenTiming, Table 1)
    ("llama-3.1.json", "qwen-2.tiktoken", "109,566; 0.85", "0.643; 0.722"),
    ("llama-3.1.json", "llama-2.json", "", "0.064; 0.075"),
    ("llama-3.1.json", "gpt-2.tiktoken", "", "0.319; 0.337"),
    ("qwen-3.json", "qwen-2.tiktoken", "", "0.999; 0.999"),
    ("qwen-3.json", "llama-2.json", "", "0.055; 0.063"),
    ("qwen-3.json", "gpt-2.tiktoken", "", "0.265; 0.279"),
    ("phi-4.tiktoken", "qwen-2.tiktoken", "", "0.649; 0.654"),
    ("phi-4.tiktoken", "llama-2.json", "", "0.078; 0.095"),
    ("phi-4.tiktoken", "gpt-2.tiktoken", "", "0.400; 0.429"),
    ("mistral-3.json", "llama-2.json", "24,184; 0.74", ""),
    ("mistral-3.json", "qwen-2.tiktoken", "10,566; 0.32", ""),
    ("llama-2.json", "qwen-2.tiktoken", "9,588; 0.30 (Phi-3)", ""),
)


@table("vocabularies", "heterogeneous-vocabularies.md", *REAL)
async def shared(bench: Seeds) -> str:
    """What two vocabularies share: tokens of the same text, and tokens that are spelled the same in tokenizer.json."""
    texts, spellings = {}, {}
    for name in {name for row in PUBLISHED for name in row[:2]}:
        loaded = NamedTokenizer.load(str(bench.file(name)), Side.TARGET)
        texts[name] = strings_of(loaded.tokenization.vocabulary)
        whole = json.loads(loaded.tokenizer_json)
        spellings[name] = {*whole["model"]["vocab"], *(token["content"] for token in whole["added_tokens"])}
    rows = []
    for target, drafter, paper, other in PUBLISHED:
        shown = []
        for of in (texts, spellings):
            ours, theirs = of[target], of[drafter]
            both, larger = len(ours & theirs), max(len(ours), len(theirs))
            shown.append((f"{both:,}; {both / len(ours):.3f}", f"{both / len(ours | theirs):.3f}; {both / larger:.3f}"))
        pair = f"{target.rpartition('.')[0]}, {drafter.rpartition('.')[0]}"
        (text, of_text), (spelled, of_spelled) = shown
        rows.append((pair, text, spelled, paper, of_text, of_spelled, other))
    count, share = "T∩D; of T", "of T∪D; of the larger"
    heads = ("target, drafter", count, f"{count}, as spelled", "published", share, f"{share}, as spelled", "published")
    return Table(heads, tuple(rows)).markdown()


@table("combinations", "heterogeneous-vocabularies.md", *REAL)
async def combinations(bench: Seeds) -> str:
    rows = [("Qwen2-7B-Instruct (published)", "150,000", "7, 15, 56", "144.31", "65,536", "14; 16", "", "")]
    sources = {"qwen-2": str(bench.file("qwen-2.tiktoken")), short(TARGET): TARGET, short(B): B}
    for name, source in sources.items():
        plain = sorted(
            plain_strings(NamedTokenizer.load(source, Side.TARGET).tokenization.vocabulary),
            key=lambda text: (len(text), text),
        )
        pieces, kept = Pieces(plain), plain[:SHORTEST] if len(plain) > SHORTEST else [x for x in plain if len(x) < 18]
        found = [pieces.compositions(text) for text in kept]
        ways, forwards = (
            combinations_of(list(ones)) for ones in zip(*((x.count, x.forwards) for x in found), strict=True)
        )
        hello = pieces.compositions(from_bytes(b"hello"))
        means = [f"{10**counted.log10_of_mean:,.1f}" for counted in (ways, forwards)]
        shown = [", ".join(f"{number:,}" for number in counted.quartiles) for counted in (ways, forwards)]
        largest = f"{10**ways.log10_of_largest:,.0f}"
        spelled = f"{hello.count}; {hello.forwards}"
        rows.append((name.lower(), f"{ways.tokens:,}", shown[0], means[0], largest, spelled, shown[1], means[1]))
    heads = ("", "tokens", "quartiles", "mean", "largest", "`hello`: ways; forwards", "forwards, quartiles", "mean")
    return Table(heads, tuple(rows)).markdown()


@table("forwards", "heterogeneous-vocabularies.md", *PAIR, "drafter-c")
async def forwards(bench: Seeds) -> str:
    """Figure 1 after texts: the forwards for ψ of target tokens, with whole rows and with rows cut to `CUT` ids."""
    target, draw, lines = bench.readers[TARGET], np.random.default_rng(SEED), []
    plain = sorted(text for text in plain_strings(target.vocabulary) if len(text) < 18)
    any_tokens = [[Letters(text) for text in draw.choice(plain, 16)] for _ in bench.places]
    written = [[text.ends[0]] for text in limit.drawn(target, bench.places, 1, draw)]
    for name in (A, B, C):
        drafter, found = bench.readers[name], []
        pieces, trie = Pieces(plain_strings(drafter.vocabulary)), drafter.vocabulary.trie
        for tokens in (any_tokens, written):
            whole, cut, longer = [], [], []
            for place, some in list(zip(bench.places, tokens, strict=True))[::2]:
                rows = CutRows(drafter, drafter.ids(place))
                forwards_of(some, trie, rows)  # all at once: the rows are there afterwards
                for token in some:
                    whole.append(pieces.compositions(token).forwards)
                    cut.append(forwards_of([token], trie, rows))
                    longer.append(forwards_of([token, *target.vocabulary.trie.extensions(token)], trie, rows))
            found += [f"{_counts(ones)}; {np.mean(ones):,.1f}" for ones in (whole, cut, longer)]
        lines.append((short(name), *found))
    heads = ("all ids", f"{CUT} ids", f"{CUT} ids, longer tokens, too")
    columns = (f"{kind}: {head}" for kind in ("any token", "the next token") for head in heads)
    return Table(("drafter", *columns), tuple(lines)).markdown()


def _counts(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in quartiles(sorted(numbers)))


class CutRows:
    """A drafter's rows after a text and draft tokens, cut as those that drafts are drawn from."""

    def __init__(self, drafter: limit.Reader, ids: tuple[int, ...]) -> None:
        self._drafter, self._ids = drafter, ids
        self._known: dict[tuple[int, ...], SortedDistribution] = {}

    def __call__(self, paths: Sequence[tuple[int, ...]]) -> list[SortedDistribution]:
        new = [path for path in paths if path not in self._known]
        rows = self._drafter.rows([(*self._ids, *path) for path in new]) if new else ()
        for path, row in zip(new, rows, strict=True):
            kept = narrowed(np.arange(len(row)), row, CUT)
            self._known[path] = SortedDistribution.of(*kept, self._drafter.vocabulary.trie)
        return [self._known[path] for path in paths]


def forwards_of(strings: Sequence[Letters], trie: Trie, rows: Rows) -> int:
    """The forwards by which a drafter knows how probable it is that its text begins with each of the strings."""
    sums, count, level = PrefixSums(strings, trie), 0, [scoring.Node()]
    while level:
        count += len(level)
        after = zip(level, rows([node.path for node in level]), strict=True)
        level = [longer for node, row in after for longer in sums.add(node, row, last=False)]
    return count


@table("injectivity", "heterogeneous-vocabularies.md", *REAL)
async def injectivity(bench: Seeds) -> str:
    sample = inspect.getsource(json.decoder)
    rows = []
    for path in sorted(bench.plan.vocabularies.iterdir()):
        if path.stem == "mistral-3":
            continue  # it has no merges here, and so encodes otherwise
        tokenization = NamedTokenizer.load(str(path), Side.TARGET).tokenization
        found, own = decoding(tokenization, sample), compare(tokenization, tokenization, sample, 1).target_injectivity
        rows.append((path.stem, *(f"{x.restored} of {x.strings}" for x in (found, own))))
    return Table(("tokenizer", "decode(encode(s)) = s", "its tokens have the text's letters"), tuple(rows)).markdown()


# RDK: rdk.md.


@table("first-draft-token", "rdk.md", *PAIR, "drafter-c")
async def first_draft_token(bench: Seeds) -> str:
    """Σ min(p, ·) at places, and the share of greedy draft tokens that are the target's, with each matrix."""
    target, lines = bench.readers[TARGET], []
    p = target.rows([target.ids(text) for text in bench.places])
    best = p.argmax(1)
    for name in (A, B, C):
        drafter, matrix = bench.readers[name], load_affinity(bench.affinity(name)).matrix
        pair = Pair(target.vocabulary, drafter.vocabulary)
        shared_ids = pair.shared_drafter_ids
        q = drafter.rows([drafter.ids(text) for text in bench.places])[:, shared_ids]
        q /= q.sum(1, keepdims=True)
        plain, spread, after, before = [], [], [], []
        for place, row in enumerate(q):
            ids, weights = matrix.redistribute(shared_ids, row)
            top = shared_ids[[row.argmax()]]
            own = pair.to_target_ids(shared_ids)
            plain.append(float(np.minimum(p[place][own], row).sum()))
            spread.append(float(np.minimum(p[place][ids], weights).sum()))
            after.append(float(ids[weights.argmax()] == best[place]))
            first, chances = matrix.redistribute(top, np.ones(1))
            guesses = pair.to_target_ids(top)[0], first[chances.argmax()]
            before.append([float(guess == best[place]) for guess in guesses])
        greedy = map(percent, (*np.array(before).T, after))
        lines.append((short(name), percent(plain), percent(spread, plain), *greedy))
    heads = ("drafter", "T = 1: `tli`", "`rdk`", "T = 0: `tli`", "temperature first", "redistributed first")
    return f"{len(bench.places)} places.\n\n" + Table(heads, tuple(lines)).markdown()


@table("pruned-target", "rdk.md", "target")
async def pruned_target(bench: Seeds) -> str:
    """Figure 12: the target as its own drafter with a cut vocabulary, and M of the logits' covariance (equation 4)."""
    target = bench.readers[TARGET]
    logits = torch.cat([target.logits([target.ids(text)]) for text in bench.places])
    train, test = logits[::2], logits[1::2]
    spread = train - train.mean(0)
    p = test.softmax(-1)
    random = torch.from_numpy(np.random.default_rng(SEED).permutation(p.shape[1]))
    often = train.softmax(-1).mean(0).argsort(descending=True)
    rows = []
    for kind, order in (("at random", random), ("most frequent", often)):
        for kept in (2048, 512, 128, 32):
            ids = order[:kept]
            omega, q = spread[:, ids].T @ spread / len(train), test[:, ids].softmax(-1)
            tli = torch.minimum(p[:, ids], q).sum(1).numpy()
            spreads = {tau: q @ (omega / tau).softmax(-1) for tau in (0.1, 0.3, 1.0, 3.0)}
            by_tau = {tau: torch.minimum(p, drafted).sum(1).numpy() for tau, drafted in spreads.items()}
            tau, found = max(by_tau.items(), key=lambda known: known[1].mean())
            rows.append((f"{kept:,} {kind}", percent(tli), percent(found, tli), f"{tau:g}"))
    return Table(("ids kept", "`tli`", "M of logits", "best τ"), tuple(rows)).markdown()


@table("rdk-generations", "rdk.md", *PAIR, "drafter-c")
async def rdk_generations(bench: Seeds) -> str:
    lines = {
        short(name): {
            f"`{method}`, T = {t:g}": bench.setting(method, name, t) for t in (0.0, 1.0) for method in ("tli", "rdk")
        }
        for name in (A, B, C)
    }
    return await bench.grid(lines, per_pass, "drafter")


@table("rdk-synthetic", "rdk.md")
async def rdk_synthetic(bench: Seeds) -> str:
    """Figures 5 to 7: what random targets accept of pruned drafters; means of 20 draws."""
    parts = []
    for size, taus in ((200_000, ()), (2_000, (1e-4, 1e-2, 1.0))):
        draws, rows = [synthetic_pair(size, np.random.default_rng((SEED, size, number))) for number in range(20)], []
        for kind, shares in (("at random", (0.5, 0.25, 0.1, 0.01, 0.0025)), ("most probable", (0.25, 0.0025))):
            for kept in (round(share * size) for share in shares):
                drawn = np.array([redistributed(p, q, orders[kind][:kept], taus) for p, q, orders in draws])
                masked, tli, third, uniform, _, apart, theta, *spread = drawn.mean(0)
                shown = [f"{share:.2%}" for share in (masked, tli, third, *spread, uniform)]
                largest = f"{np.abs(drawn[:, 1] - drawn[:, 2]).max():.1e}; {drawn[:, 4].max():.1e}"
                rows.append((f"{kept:,} {kind}", *shown, largest, f"{apart:.3f}" if taus else "", f"{theta:.1e}"))
        spreads = (f"Mᵀq′, τ = {tau:g}" for tau in taus)
        heads = (f"kept of {size:,}", "masked", "`tli`", "Eq. 3", *spreads, "uniform")
        others = ("largest change by Eq. 3: accepted; L₁", "L₁ of Eq. 3 and the last τ", "θ")
        parts.append(Table((*heads, *others), tuple(rows)).markdown())
    return "\n".join(parts)


def softmax(logits: Probabilities) -> Probabilities:
    found: Probabilities = torch.from_numpy(logits).softmax(-1).numpy()
    return found


def synthetic_pair(size: int, random: np.random.Generator) -> tuple[Probabilities, Probabilities, dict[str, Ids]]:
    """p of Student-t logits, 5 degrees of freedom, scaled so that a quarter of the tokens has 95.8 % of the mass, as in
    Figure 5; q with noise of standard deviation 1 on these; orders in which tokens are kept."""
    logits = random.standard_t(5, size)
    low, high, order = 0.0, 64.0, np.sort(logits)[::-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if softmax(order * middle)[: size // 4].sum() < 0.958 else (low, middle)
    p, q = softmax(logits * low), softmax(logits * low + random.standard_normal(size))
    return p, q, {"at random": random.permutation(size), "most probable": np.argsort(-p, kind="stable")}


def redistributed(p: Probabilities, q: Probabilities, ids: Ids, taus: Sequence[float]) -> list[float]:
    """Accepted: q without the other tokens, that normalized (q′), Eq. 3 with p, the uniform draft; by how much Eq. 3
    moves q′ (L₁), its distance to the last Mᵀq′, p·q′; accepted of Mᵀq′ by τ, with Ω = diag(p) − ppᵀ."""
    size, masked = len(p), np.zeros(len(p))
    masked[ids] = q[ids]
    own = masked / masked.sum()
    theta = float(p @ own)
    third = (size * own + theta * p) / (size + p)
    third /= third.sum()
    omega = np.where(np.arange(size) == ids[:, None], p, 0.0) - np.outer(p[ids], p) if taus else np.zeros(0)
    spread = [own[ids] @ softmax(omega / tau) for tau in taus]
    drafts = (masked, own, third, np.full(size, 1 / size), *spread)
    accepted = [float(np.minimum(p, draft).sum()) for draft in drafts]
    apart = [float(np.abs(third - other).sum()) for other in (own, *spread[-1:])]
    return [*accepted[:4], apart[0], apart[-1], theta, *accepted[4:]]


# TokenTiming: tokentiming.md.


@table("tokentiming", "tokentiming.md", *PAIR)
async def tokentiming(bench: Seeds) -> str:
    lines = {
        f"{short(name)}, `{method}`": {f"T = {t:g}": bench.setting(method, name, t) for t in (0.0, 0.6, 1.0)}
        for name in (A, B)
        for method in ("tokentiming", "tli")
    }
    return await bench.grid(lines, _with_repeats, "drafter, method")


def _with_repeats(cell: MeasuredSetting) -> str:
    return f"{cell.acceptance:.0%}; {_tokens(cell)}"


@table("bands", "tokentiming.md", "target", "drafter-a", "drafter-b", "drafter-c")
async def bands(bench: Seeds) -> str:
    """Figures 5 and 6: how far aligned tokens are apart, and in how many alignments a narrower band changes q."""
    texts = [document.text[start : start + 200] for document in read_corpus().held_out[:40] for start in (0, 400)]
    target, rows = bench.readers[TARGET].tokenization, []
    for name in (A, B, C):
        apart, changed, count = [], dict.fromkeys((0, 1, 2, 4, 8), 0), 0
        seconds: dict[int, list[float]] = {band: [] for band in (*changed, 16, NO_BAND)}
        for text in filter(None, texts):
            tokens = [_letters(side, text) for side in (bench.readers[name].tokenization, target)]
            for draft, proxies in _windows(tokens[0], tokens[1]):
                last: dict[int, dict[int, int]] = {}
                for band, taken in seconds.items():
                    began = time.perf_counter()
                    pairs = align(draft, proxies, band)
                    taken.append(time.perf_counter() - began)
                    last[band] = {there: here for here, there in pairs}
                apart += [abs(here - there) for here, there in pairs]  # of the last one, without a band
                count += 1
                for band in changed:
                    changed[band] += last[band] != last[NO_BAND]
        shares = [f"{np.mean(np.array(apart) > most):.1%}" for most in (0, 1, 2, 4, 8)]
        other = "; ".join(f"{n / count:.1%}" for n in changed.values())
        micro = "; ".join(f"{1e6 * np.median(taken):.0f}" for taken in seconds.values())
        rows.append((short(name), f"{count:,}", "; ".join(shares), str(max(apart)), other, micro))
    heads = ("drafter", "alignments", "Δpos > 0; 1; 2; 4; 8", "largest", "other q with band 0; 1; 2; 4; 8")
    return Table((*heads, "µs with 0; 1; 2; 4; 8; 16; none"), tuple(rows)).markdown()


@table("band-tokens", "tokentiming.md", "target", "drafter-a", "drafter-b", "drafter-c")
async def band_tokens(bench: Seeds) -> str:
    """Appendix K: what the band does to acceptance, with drafts that are long enough for it to matter."""
    lines = {
        "none" if band == NO_BAND else str(band): {
            f"{short(name)}, K = 16": bench.setting("tokentiming", name, 1.0, 16, band=band) for name in (A, B, C)
        }
        for band in (0, 4, 8, NO_BAND)
    }
    return await bench.grid(lines, _with_repeats, "band, T = 1")


def _letters(tokenization: Any, text: str) -> list[Letters]:
    return [
        tokenization.vocabulary.letters[token] for token in tokenization.encode_continuation(from_bytes(text.encode()))
    ]


def _windows(drafted: list[Letters], proxies: list[Letters]) -> Iterator[tuple[list[Letters], list[Letters]]]:
    """Stretches of STRETCH draft tokens, or more, and the target tokens of the same text, which begin and end there."""
    ends, others = ([0, *np.cumsum([len(token) for token in tokens]).tolist()] for tokens in (drafted, proxies))
    both = sorted({*ends} & {*others})
    begun = 0
    for end in both[1:]:
        first, last = ends.index(begun), ends.index(end)
        if last - first >= STRETCH:
            yield drafted[first:last], proxies[others.index(begun) : others.index(end)]
            begun = end


# FR-Spec: fr-spec.md.

PUBLISHED_SHARES = {2: "97.7%; 97%", 4: "93.3%; 91%", 8: "87.4%; 83%", 16: "80.5%; 74%"}  # by the part of the ids


@table("kept-ids", "fr-spec.md", *PAIR)
async def kept_ids(bench: Seeds) -> str:
    lines = {
        f"{keep or 2048:,}{f' and {follow} of the text' if follow else ''}": {
            f"{short(name)}, T = {t:g}": bench.setting(method, name, t, keep=keep, follow=follow)
            for name in (A, B)
            for method, t in (("slem", 0.0), ("seeded", 1.0))
        }
        for keep, follow in ((0, 0), (1024, 0), (512, 0), (256, 0), (128, 0), (384, 128), (128, 128))
    }
    return await bench.grid(lines, per_pass, "kept", "2,048") + "\n" + _covered(bench)


def _covered(bench: Seeds) -> str:
    """What the most frequent ids make of the corpus, beside the paper's shares (Table 1, Llama-3-8B, SlimPajama)."""
    loaded = {name: NamedTokenizer.load(name, Side.DRAFTER).tokenizer_json for name in (A, B)}
    found = [read_frequencies(bench.frequencies(name), tokenizer, name) for name, tokenizer in loaded.items()]
    rows = [
        (f"{2048 // of:,}", *(f"{ranking.covered(2048 // of):.1%}" for ranking in found), published)
        for of, published in PUBLISHED_SHARES.items()
    ]
    heads = "kept", "of the corpus in A's tokens", "in B's", "published shares, as above, of 128k ids"
    return Table(heads, tuple(rows)).markdown()


@table("kept-ids-trees", "fr-spec.md", *PAIR[::2])
async def kept_ids_trees(bench: Seeds) -> str:
    lines = {
        f"{keep or 2048:,}": {
            f"nodes {nodes or 'none'}": bench.setting("slem", B, 0.0, 6, keep, nodes=nodes) for nodes in (0, 32)
        }
        for keep in (0, 1024, 512, 256)
    }
    return await bench.grid(lines, per_pass, "kept", "2,048")


class ByLayer(TreeDrafting):
    """EAGLE-2's beam: a step expands the heaviest nodes of the layer that was drafted last."""

    def _heaviest(self, count: int) -> Iterator[Node]:
        depth, layer = self._draft[-1].depth, sorted(self._unexpanded)
        self._unexpanded.clear()
        return islice((node for node in layer if node.depth == depth), count)

    def _forward(self, nodes: Sequence[Node]) -> Job[list[TopRow | None]]:
        rows = yield from super()._forward(nodes)
        self._rows = {}  # the engine would choose by itself
        return rows


@table("tree-by-layer", "fr-spec.md", *PAIR[::2])
async def tree_by_layer(bench: Seeds) -> str:
    """All prompts, in this process: a drafter whose trees choose otherwise what to expand."""
    whole = Seeds(replace(bench.plan, limit=None))
    run, rows = AcceptanceBenchmark(whole.acceptance, ()), []
    settings = [Setting("slem", B, 0.0, depth, nodes=nodes) for nodes, depth in ((32, 6), (16, 5))]
    async with pair_here(ModelOptions(TARGET, threads=1), ModelOptions(B, threads=1)) as pipeline:
        for name, trees in (("of any depth", TreeDrafting), ("of the last layer, as EAGLE-2", ByLayer)):
            with patch("crossdraft.drafter.service.TreeDrafting", trees):
                cells = [await run.cell(pipeline, setting, lambda *_: None) for setting in settings]
            rows.append((name, *map(_tokens, cells)))
    heads = "expands the heaviest nodes", *(f"{setting.nodes} nodes, depth {setting.k}" for setting in settings)
    return Table(heads, tuple(rows)).markdown() + whole.sizes


@table("head", "fr-spec.md")
async def head(bench: Seeds) -> str:
    """Figure 6: a layer of Llama-3.2-1B's shape, and head and softmax over N of 128,256 ids, one token at a time; on
    a thread in float32, and on a GPU, if there is one, in bfloat16."""
    width, inner, rows = 2048, 8192, []
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16))[: 1 + torch.cuda.is_available()]:
        made = partial(torch.randn, device=device, dtype=dtype)
        shapes = ((width, width + 1024), (width, width), (width, 2 * inner), (inner, width))
        seconds = partial(_seconds, runs=1 if device == "cpu" else 10)
        layer = sum(seconds(partial(linear, made(1, shape[0]), made(shape[::-1]))) for shape in shapes)
        x, weights = made(1, width), made(128_256, width)
        for kept in (128_256, 65_536, 32_768, 16_384, 8_192):
            logits = seconds(partial(linear, x, weights[:kept]))
            chances = seconds(partial(torch.softmax, linear(x, weights[:kept]), -1))
            step = layer + logits + chances
            times = (f"{1e3 * spent:.2f}" for spent in (layer, logits, chances, step))
            rows.append((device, f"{kept:,}", *times, f"{logits / step:.0%}"))
    return Table(("device", "kept", "layer, ms", "head", "softmax", "step", "head's share"), tuple(rows)).markdown()


def _seconds(run: Callable[[], Tensor], runs: int) -> float:
    """The least of many, so many of them waited for together: other work on the machine makes the others longer."""
    return min(timeit.repeat(lambda: [run() for _ in range(runs)][-1][0, 0].item(), number=1, repeat=60)) / runs


@table("eagle", "eagle.md", *PAIR[::2], "drafter-eagle")
async def eagle(bench: Seeds) -> str:
    """All prompts: a drafter that reads the target's states, its head whole and cut, beside one that does not."""
    lines = {
        f"{short(name)}, {keep or 'all'}": {
            f"`{method}`, {'tree of 32' if nodes else 'chain'}, T = {t:g}": bench.setting(
                method, name, t, 6, keep, nodes=nodes
            )
            for method, t in (("slem", 0.0), ("seeded", 1.0), ("standard", 1.0))
            for nodes in (0, 32)
            if not keep or method == "slem"
        }
        for name, keep in ((B, 0), (EAGLE, 0), (EAGLE, 2048), (EAGLE, 1024), (EAGLE, 512))
    }
    tokens = await Seeds(replace(bench.plan, limit=None)).grid(lines, _tokens, "drafter, kept ids", "EAGLE, all")
    greedy = {name: {head: how for head, how in row.items() if not how.temperature} for name, row in lines.items()}
    alone = Seeds(replace(bench.plan, limit=4), 1)
    steps = await alone.grid(greedy, lambda cell: f"{1e3 * cell.step_seconds:.2f}", "ms of the drafter a step, alone")
    return f"{tokens}\n{steps}"


def _tokens(cell: MeasuredSetting) -> str:
    return f"{per_pass(cell)}; {without_repeats(cell)}"


# The guide, and what is left to gain.


@table("formula", "guide.md", *PAIR)
async def formula(bench: Seeds) -> str:
    rows = []
    settings = [Setting("standard", TARGET, t, 5) for t in (0.0, 1.0)]
    settings += [bench.setting("tli", name, t) for name in (B, A) for t in (0.0, 1.0)]
    cells = await bench.cells(settings)
    for setting in filter(cells.__contains__, settings):
        cell, a = cells[setting], cells[setting].acceptance
        wanted = sum(a**place for place in range(setting.k + 1))
        name = f"`{setting.method}`, {short(setting.drafter).removeprefix('BUNDLED:').lower()}, {setting.temperature:g}"
        rows.append((name, f"{a:.1%}", f"{wanted:.2f}", per_pass(cell)))
    return Table(("method, drafter, temperature", "α", "formula", "measured"), tuple(rows)).markdown() + bench.sizes


def prompts_by_kind(count: int) -> dict[str, list[str]]:
    """Prompts of what held-out sources have, or are made of them."""
    code = [document.text for document in read_corpus().held_out if len(document.text) > 4000][:count]
    texts = [ast.get_docstring(ast.parse(source)) or "" for source in code]
    functions = [[node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)] for text in code]
    rows = [
        json.dumps([{"name": each.name, "line": each.lineno} for each in some[:12]], indent=2) for some in functions
    ]
    bodies = [ast.unparse(max(some[:12], key=lambda function: len(function.body))) for some in functions if some]
    found = {
        "code": [text[2000:2400] for text in code],
        "prose": [text[:300] for text in texts if len(text) > 100],
        "JSON": [row[:300] for row in rows if len(row) > 300],
        "chat": [f"# Q: what does {some[0].name} do?\n# A: " for some in functions if some],
        "edits": [f"{one}\n\n# the same again, renamed:\n{one[: len(one) // 3]}" for one in bodies if len(one) < 900],
    }
    return {kind: some for kind, some in found.items() if some}


@table("kinds", "choosing.md", *PAIR[::2])
async def kinds(bench: Seeds) -> str:
    """Tokens per pass by the kind of text."""
    prompts, path = prompts_by_kind(bench.plan.limit or 30), bench.plan.work / "kinds.jsonl"
    lines = [{"text": text, "category": kind} for kind, some in prompts.items() for text in some]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part = Seeds(replace(bench.plan, prompts=path, limit=None))
    wanted = [bench.setting(method, B, t) for method, t in (("slem", 0), ("seeded", 1), ("coupled", 1))]
    cells = await part.cells(wanted)
    rows = [
        (kind, str(len(some)), *(_tokens(cells[key].kinds[kind]) for key in wanted)) for kind, some in prompts.items()
    ]
    heads = "kind", "prompts", *(f"`{setting.method}`, T = {setting.temperature:g}" for setting in wanted)
    return Table(heads, tuple(rows)).markdown()


@table("limit", "what-is-left.md", *PAIR, "drafter-c")
async def left_to_gain(bench: Seeds) -> str:
    chains = ("tli", "coupled-shared", "coupled", "slem", "seeded", "slrs", "tokentiming")
    lines = {method: (method, 5, 0) for method in chains}
    lines |= {f"{method}, a tree of 32, depth 6": (method, 6, 32) for method in (*chains[:3], "seeded")}
    settings = {
        line: [bench.setting(method, name, 1.0, k, nodes=nodes) for name in (A, B)]
        for line, (method, k, nodes) in lines.items()
    }
    cells = await bench.cells(setting for row in settings.values() for setting in row)
    rows = {line: [_rounds(cells[setting]) for setting in row] for line, row in settings.items()}
    some = bench.places[:: max(1, len(bench.places) // 80)]
    for name in (A, B):
        texts = limit.drawn(bench.readers[TARGET], some, 10, np.random.default_rng(SEED))
        found = [limit.begun(bench.readers[name], text, 6) for text in texts]
        for line, drafts, k in (("**limit**, one draft", 1, 5), ("limit, 8 drafts", 8, 6), ("limit, 32 drafts", 32, 6)):
            bound = limit.tokens_per_pass(texts, [chances[k - 1] for chances in found], drafts)
            first = percent(_first_tokens(bench, name, some[::2])) if drafts == 1 else ""
            rows.setdefault(line, []).append(("{:.2f} ± {:.2f}".format(*bound), first))
    heads = ("T = 1, K = 5", *(f"{short(name)}: {what}" for name in (A, B) for what in ("tokens per pass", "first")))
    return Table(heads, tuple((line, *chain(*figures)) for line, figures in rows.items())).markdown() + bench.sizes


def _rounds(cell: MeasuredSetting) -> tuple[str, str]:
    """Tokens per pass; of a chain, too, how many of the first draft tokens are accepted."""
    return per_pass(cell), "" if cell.nodes else f"{cell.acceptance_at[0]:.1%}"


def _first_tokens(bench: Seeds, name: str, places: Sequence[Letters]) -> list[float]:
    """The limit of one target token at places."""
    target, found = bench.readers[TARGET], []
    for text, row in zip(places, target.rows([target.ids(text) for text in places]), strict=True):
        ids = np.flatnonzero(row > 1e-5).tolist()
        p = {target.vocabulary.letters[token]: float(row[token]) for token in ids}
        drafts, unknown = limit.texts_of(bench.readers[name], text, p, 5)
        found.append(min(1.0, limit.first_token(p, drafts) + unknown + 1 - sum(p.values())))
    return found
