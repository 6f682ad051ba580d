"""`crossdraft bench expected`: expected acceptance of one token after each prompt, from whole rows.

Nothing is drawn: the models' distributions are read, and `verification.expectation` computes what each method would
accept. So there is no sampling error within a prompt, and methods can be compared prompt by prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar

import torch
from torch import Tensor

from crossdraft.bench.harness import Advance, Benchmark, Table
from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.drafter.context import Context
from crossdraft.engine.distributions import distribution
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import LoadedModel, load_model
from crossdraft.engine.names import ModelLoadError
from crossdraft.engine.requests import ForwardRequest
from crossdraft.session.resolution import tokenization_of
from crossdraft.text.affinity import Affinity, AffinityMismatch, load_affinity
from crossdraft.text.letters import Letters, Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import Ids, Row, Whose
from crossdraft.verification.expectation import EXPECTATIONS, DraftDistribution, Expected
from crossdraft.verification.methods import METHODS, Method

COMPARISONS = (("coupled-shared", "tli"), ("coupled", "slem"), ("tli", "union"), ("slrs", "slem"))
ROUNDING = 1e-9
SESSION = "whole rows"


@dataclass(frozen=True)
class Cell:
    """One method with one drafter at one temperature, over all prompts."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int
    prompts: int
    acceptance: float  # expected, of a round's first token; mean over prompts, at least this
    standard_error: float  # of the mean, over prompts
    pruned: float  # mean of what rows that were not asked for could add


@dataclass(frozen=True)
class Comparison:
    """Two methods over the same prompts."""

    more: str
    less: str
    drafter: str
    temperature: float
    holds: bool  # whether the first one's mean is not smaller
    below: int  # prompts where the first one accepts less for certain, whatever was pruned


@dataclass(frozen=True)
class ExpectedAcceptance(Benchmark[Cell | Comparison]):
    """Every method that a pair can do, at every temperature."""

    target: str  # a model's name
    drafters: tuple[str, ...]
    prompts: tuple[str, ...]
    temperatures: tuple[float, ...]
    k: int  # draft tokens whose text counts
    least: float  # rows are not asked for where both sides still agree with a smaller probability
    affinities: Mapping[str, Path]  # by a drafter's name
    after: int = 0  # tokens of the target's greedy continuation before the token that is judged

    unit: ClassVar[str] = "prompts"

    @property
    def total(self) -> int:
        return len(self.drafters) * len(self.prompts)

    def check(self) -> None:
        if self.k < 1:
            raise UsageError(f"-k must be at least 1, got {self.k}")
        if self.after < 0:
            raise UsageError(f"--after must be 0 or more, got {self.after}")
        if not 0 <= self.least < 1:
            raise UsageError(f"--least must be 0 or more and below 1, got {self.least}")
        if any(not 0 <= temperature < float("inf") for temperature in self.temperatures):
            raise UsageError(f"a temperature must be 0 or more, got {min(self.temperatures)}")

    def measure(self, advance: Advance) -> Iterator[Cell | Comparison]:
        target = Subject.of(self.target, Side.TARGET)
        for name in self.drafters:
            advance(0, name)
            for temperature, methods in self._of_drafter(target, name, advance).items():
                for method, found in methods.items():
                    yield self._cell(method, name, temperature, found)
                yield from _comparisons(name, temperature, methods)

    def _of_drafter(self, target: "Subject", name: str, advance: Callable[[], None]) -> "Found":
        drafter = Subject.of(name, Side.DRAFTER)
        pair = Pair(target.tokenization.vocabulary, drafter.tokenization.vocabulary)
        path = self.affinities.get(name)
        affinity = None if path is None else affinity_for(path, target, drafter)
        methods = list(_possible(pair, affinity))
        found: Found = {temperature: {method.name: [] for method in methods} for temperature in self.temperatures}
        for prompt in self.prompts:
            ids, continued = target.continued(prompt, self.after)
            context = Context(drafter.tokenization, Letters(from_bytes(prompt.encode())), drafter.context)
            context.rewind(0, continued)
            context.fit(self.k)
            for temperature, by_method in found.items():
                row = target.rows.after(ids, temperature)
                for method in methods:
                    rows = _drafter_rows(method, drafter.rows, context.ids, temperature, pair, affinity)
                    whose = Whose.TARGET if method.redistributed else Whose.DRAFTER
                    drafting = DraftDistribution(pair, rows, self.k, self.least, whose)
                    by_method[method.name].append(EXPECTATIONS[method.name](row, drafting))
            target.rows.forget()
            drafter.rows.forget()
            advance()
        return found

    def _cell(self, method: str, drafter: str, temperature: float, found: Sequence[Expected]) -> Cell:
        values = [one.acceptance for one in found]
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        pruned = fmean(one.pruned for one in found)
        return Cell(method, drafter, temperature, self.k, len(found), fmean(values), error, pruned)

    def report(self, results: Sequence[Cell | Comparison]) -> Iterator[Table | str]:
        cells = [one for one in results if isinstance(one, Cell)]
        found = {(cell.drafter, cell.temperature, cell.method): f"{cell.acceptance:.4f}" for cell in cells}
        methods = [name for name in EXPECTATIONS if any(cell.method == name for cell in cells)]
        title = f"Expected acceptance of a round's first token, text of {self.k} draft tokens"
        yield self._by_cell(title, methods, found)
        held = {
            (one.drafter, one.temperature, f"{one.more} ≥ {one.less}"): f"{'yes' if one.holds else 'no'} ({one.below})"
            for one in results
            if isinstance(one, Comparison)
        }
        compared = [f"{more} ≥ {less}" for more, less in COMPARISONS]
        yield self._by_cell("Of means (and prompts where not)", compared, held)
        yield f"Pruned: at most {max(cell.pruned for cell in cells):.4f} in a cell (--least 0 prunes nothing)."

    def _by_cell(self, title: str, names: Sequence[str], shown: Mapping[tuple[str, float, str], str]) -> Table:
        """One row for each drafter and temperature."""
        rows = (
            (drafter, f"{temperature:g}", *(shown.get((drafter, temperature, name), "–") for name in names))
            for drafter in self.drafters
            for temperature in self.temperatures
        )
        return Table(("drafter", "T", *names), tuple(rows), title)


Found = dict[float, dict[str, list[Expected]]]  # by temperature and method, one entry a prompt


def _possible(pair: Pair, affinity: Affinity | None) -> Iterator[Method]:
    """The methods with an expectation that the pair can do."""
    for method in (METHODS[name] for name in EXPECTATIONS):
        if method.same_vocabulary and not pair.same_vocabulary:
            continue
        if method.redistributed and affinity is None:
            continue
        if method.shared_only and not len(pair.shared_drafter_ids):
            continue
        yield method


def _drafter_rows(
    method: Method,
    rows: "WholeRows",
    ids: tuple[int, ...],
    temperature: float,
    pair: Pair,
    affinity: Affinity | None,
) -> Callable[[tuple[int, ...]], Row]:
    """What a method's draft tokens are drawn from: the whole row after more of the drafter's tokens."""
    if method.redistributed:
        assert affinity is not None
        allowed: Ids | None = affinity.drafter_ids
    else:
        allowed = pair.shared_drafter_ids if method.shared_only else None

    def after(tokens: tuple[int, ...]) -> Row:
        row = rows.after((*ids, *tokens), temperature, allowed)
        if affinity is None or not method.redistributed:
            return row
        return Row(*affinity.redistribute(row.ids, row.probabilities))

    return after


def _comparisons(drafter: str, temperature: float, methods: Mapping[str, Sequence[Expected]]) -> Iterator[Comparison]:
    for more, less in COMPARISONS:
        if more in methods and less in methods:
            pairs = list(zip(methods[more], methods[less], strict=True))
            gain = fmean(one.acceptance - other.acceptance for one, other in pairs)
            below = sum(one.acceptance + one.pruned < other.acceptance - ROUNDING for one, other in pairs)
            yield Comparison(more, less, drafter, temperature, gain >= -ROUNDING, below)


# Whole rows of a model, without a service.


class WholeRows:
    """Rows after any ids of one model, each computed once until `forget`. For one thread.

    Raises:
        UnsupportedModelError, ValueError: the engine cannot run this model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = Engine(loaded.model, loaded.description.context)
        self._logits: dict[tuple[int, ...], Tensor] = {}

    @property
    def forwards(self) -> int:
        """Rows that were computed since `forget`."""
        return len(self._logits)

    def forget(self) -> None:
        """Frees what was computed."""
        self._logits.clear()

    @torch.inference_mode()
    def after(self, ids: tuple[int, ...], temperature: float, allowed: Ids | None = None) -> Row:
        """The distribution of the token after `ids`, no truncation; ids of probability 0 are left out.

        Args:
            ids: what the model is fed, prompt included, at least one.
            temperature: 0 is a one-hot row.
            allowed: int64 (m,), the only ids that may follow, others are masked before all else; None: all.

        Raises:
            ContextOverflowError, ValueError: as `Engine.check`.
        """
        if ids not in self._logits:
            (self._logits[ids],) = self._engine.forward([ForwardRequest(SESSION, ids)])
        logits = self._logits[ids]
        places = torch.arange(logits.shape[-1]) if allowed is None else torch.from_numpy(allowed)
        (probabilities,) = distribution(logits[:, places.to(logits.device)], SamplingOptions(temperature)).cpu()
        possible = probabilities > 0
        return Row(places[possible].numpy(), probabilities[possible].numpy())


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with what reads its distributions."""

    name: str
    tokenization: Tokenization
    tokenizer_json: str
    context: int  # tokens
    rows: WholeRows

    @staticmethod
    def of(name: str, side: Side) -> "Subject":
        """Loads it; raises CommandFailed."""
        try:
            loaded = load_model(name)
            about = loaded.description
            return Subject(name, tokenization_of(about, side), about.tokenizer_json, about.context, WholeRows(loaded))
        except (ModelLoadError, ValueError) as error:
            raise CommandFailed(f"{name} cannot be used: {error}") from error

    def continued(self, prompt: str, count: int) -> tuple[tuple[int, ...], Letters]:
        """Ids of the prompt and `count` tokens that the model goes on with greedily, and the letters of these."""
        ids = prompt_ids = self.tokenization.encode_prompt(prompt)
        for _ in range(count):
            ids = (*ids, int(self.rows.after(ids, 0.0).ids[0]))
        return ids, self.tokenization.letters_of(ids[len(prompt_ids) :])


def affinity_for(path: Path, target: Subject, drafter: Subject) -> Affinity:
    """The affinity of a file; raises UsageError if it is not one for this pair."""
    try:
        found = load_affinity(path)
        found.check_drafter(drafter.tokenizer_json, drafter.tokenization.vocabulary.size)
    except (OSError, AffinityMismatch) as error:
        raise UsageError(f"the affinity of {drafter.name} cannot be used: {error}") from error
    if found.target != tokenizer_digest(target.tokenizer_json):
        raise UsageError(f"{path} is for a target with another tokenizer than {target.name}")
    return found
