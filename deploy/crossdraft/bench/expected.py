"""`crossdraft bench expected`: expected acceptance of one token after each prompt, from whole rows.

Nothing is drawn: the models' distributions are read, and `verification.expectation` computes what each method would
accept. So there is no sampling error within a prompt, and methods can be compared prompt by prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from crossdraft.bench.harness import print_table, write_json
from crossdraft.console.running import CommandFailed, Misused
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
from crossdraft.types.rows import Ids, Probabilities, Row, Whose
from crossdraft.verification.expectation import EXPECTATIONS, Drafting, Expected
from crossdraft.verification.methods import METHODS

COMPARISONS = (("coupled-shared", "tli"), ("coupled", "slem"), ("tli", "union"), ("slrs", "slem"))
COLUMNS = ("drafter", "T")
ROUNDING = 1e-9


@dataclass(frozen=True)
class Question:
    """What is computed."""

    target: str  # a model's name
    drafters: tuple[str, ...]
    prompts: tuple[str, ...]
    temperatures: tuple[float, ...]
    k: int  # draft tokens whose text counts
    least: float  # rows are not asked for where both sides still agree with a smaller probability
    affinities: Mapping[str, Path]  # by a drafter's name
    after: int = 0  # tokens of the target's greedy continuation before the token that is judged

    def check(self) -> None:
        """Raises Misused if a value is out of its range."""
        if self.k < 1:
            raise Misused(f"-k must be at least 1, got {self.k}")
        if self.after < 0:
            raise Misused(f"--after must be 0 or more, got {self.after}")
        if not 0 <= self.least < 1:
            raise Misused(f"--least must be 0 or more and below 1, got {self.least}")
        if any(not 0 <= temperature < float("inf") for temperature in self.temperatures):
            raise Misused(f"a temperature must be 0 or more, got {min(self.temperatures)}")


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


def measure(question: Question, json_path: Path | None) -> None:
    """Computes every cell; tables on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or an affinity file is not for the pair.
        CommandFailed: a model cannot be loaded.
    """
    question.check()
    target = Subject.of(question.target, Side.TARGET)
    cells: list[Cell] = []
    comparisons: list[Comparison] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(question.drafters) * len(question.prompts))
        for name in question.drafters:
            progress.update(task, description=name)
            found = _of_drafter(question, target, name, lambda: progress.advance(task))
            for temperature, methods in found.items():
                cells += [_cell(question, method, name, temperature, each) for method, each in methods.items()]
                comparisons += _comparisons(name, temperature, methods)
    _print(question, cells, comparisons)
    if json_path is not None:
        record = {"target": question.target, "k": question.k, "least": question.least, "after": question.after}
        lists = {"cells": [asdict(cell) for cell in cells], "comparisons": [asdict(one) for one in comparisons]}
        write_json(json_path, record | lists)


Found = dict[float, dict[str, list[Expected]]]  # by temperature and method, one entry a prompt


# Whole rows of a model, without a service: for what is computed from distributions instead of being sampled.


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


# Models whose distributions are read as they are, without services: what `crossdraft bench expected` computes from.


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


def _of_drafter(question: Question, target: Subject, name: str, advance: Callable[[], None]) -> Found:
    drafter = Subject.of(name, Side.DRAFTER)
    pair = Pair(target.tokenization.vocabulary, drafter.tokenization.vocabulary)
    path = question.affinities.get(name)
    affinity = None if path is None else affinity_for(path, target, drafter)
    found: Found = {temperature: {} for temperature in question.temperatures}
    for prompt in question.prompts:
        ids, continued = target.continued(prompt, question.after)
        context = Context(drafter.tokenization, Letters(from_bytes(prompt.encode())), drafter.context)
        context.rewind(0, continued)
        context.fit(question.k)
        for temperature, methods in found.items():
            row = target.rows.after(ids, temperature)
            for method, drafting in _draftings(question, drafter, context.ids, temperature, pair, affinity):
                expectation = EXPECTATIONS[method]
                methods.setdefault(method, []).append(expectation(row, drafting))
        target.rows.forget()
        drafter.rows.forget()
        advance()
    return found


def _draftings(
    question: Question,
    drafter: Subject,
    ids: tuple[int, ...],
    temperature: float,
    pair: Pair,
    affinity: Affinity | None,
) -> Iterator[tuple[str, Drafting]]:
    """Each method that the pair can do, with the distribution that its draft tokens are drawn from."""
    for method in (METHODS[name] for name in EXPECTATIONS):
        shared = pair.shared_drafter_ids if method.shared_only else None
        if (method.same_vocabulary and not pair.same_vocabulary) or (shared is not None and not len(shared)):
            continue
        redistribute = None
        if method.redistributed:
            if affinity is None:
                continue
            shared, redistribute = affinity.drafter_ids, affinity.redistribute
        distribution = Distribution(drafter.rows, ids, temperature, shared, redistribute)
        whose = Whose.TARGET if method.redistributed else Whose.DRAFTER
        yield method.name, Drafting(pair, distribution.after, question.k, question.least, whose)


def _cell(question: Question, method: str, drafter: str, temperature: float, found: Sequence[Expected]) -> Cell:
    values = [one.acceptance for one in found]
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    pruned = fmean(one.pruned for one in found)
    return Cell(method, drafter, temperature, question.k, len(found), fmean(values), error, pruned)


def _comparisons(drafter: str, temperature: float, methods: Mapping[str, Sequence[Expected]]) -> list[Comparison]:
    found = []
    for more, less in COMPARISONS:
        if more in methods and less in methods:
            pairs = list(zip(methods[more], methods[less], strict=True))
            gain = fmean(one.acceptance - other.acceptance for one, other in pairs)
            below = sum(one.acceptance + one.pruned < other.acceptance - ROUNDING for one, other in pairs)
            found.append(Comparison(more, less, drafter, temperature, gain >= -ROUNDING, below))
    return found


def _print(question: Question, cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> None:
    found = {(cell.drafter, cell.temperature, cell.method): f"{cell.acceptance:.4f}" for cell in cells}
    names = [name for name in EXPECTATIONS if any(cell.method == name for cell in cells)]
    print_table(
        f"Expected acceptance of a round's first token, text of {question.k} draft tokens",
        (*COLUMNS, *names),
        _by_cell(question, names, found),
    )
    held = {
        (one.drafter, one.temperature, f"{one.more} ≥ {one.less}"): f"{'yes' if one.holds else 'no'} ({one.below})"
        for one in comparisons
    }
    titles = [f"{more} ≥ {less}" for more, less in COMPARISONS]
    print_table("Of means (and prompts where not)", (*COLUMNS, *titles), _by_cell(question, titles, held))
    print(f"Pruned: at most {max(cell.pruned for cell in cells):.4f} in a cell (--least 0 prunes nothing).")


def _by_cell(
    question: Question, names: Sequence[str], shown: Mapping[tuple[str, float, str], str]
) -> list[tuple[str, ...]]:
    """One row for each drafter and temperature."""
    return [
        (drafter, f"{temperature:g}", *(shown.get((drafter, temperature, name), "–") for name in names))
        for drafter in question.drafters
        for temperature in question.temperatures
    ]


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a drafter's draft tokens are drawn from, after a prompt."""

    rows: WholeRows
    ids: tuple[int, ...]  # of the prompt
    temperature: float
    allowed: Ids | None
    redistribute: Callable[[Ids, Probabilities], tuple[Ids, Probabilities]] | None

    def after(self, tokens: tuple[int, ...]) -> Row:
        """Its whole row after more of the drafter's tokens."""
        row = self.rows.after((*self.ids, *tokens), self.temperature, self.allowed)
        return row if self.redistribute is None else Row(*self.redistribute(row.ids, row.probabilities))


def affinity_for(path: Path, target: Subject, drafter: Subject) -> Affinity:
    """The affinity of a file; raises Misused if it is not one for this pair."""
    try:
        found = load_affinity(path)
        found.check_drafter(drafter.tokenizer_json, drafter.tokenization.vocabulary.size)
    except (OSError, AffinityMismatch) as error:
        raise Misused(f"the affinity of {drafter.name} cannot be used: {error}") from error
    if found.target != tokenizer_digest(target.tokenizer_json):
        raise Misused(f"{path} is for a target with another tokenizer than {target.name}")
    return found


SESSION = "whole rows"
