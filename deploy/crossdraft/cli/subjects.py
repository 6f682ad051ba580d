"""Models whose laws are read as they are, without services: what `crossdraft bench expected` computes from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.models.loading import load_model
from crossdraft.models.names import ModelLoadError
from crossdraft.models.whole import WholeRows
from crossdraft.pipeline.connection import tokenization_of
from crossdraft.text.affinity import Affinity, AffinityMismatch, load_affinity
from crossdraft.text.letters import Letters, Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.verification.rows import Ids, Probabilities, Row


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with what reads its laws."""

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


@dataclass(frozen=True, eq=False)
class Law:
    """What a drafter's proposals are drawn from, after a prompt."""

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
