"""How much any exact method could accept with a drafter: optimal transport between the drafts' distribution and the
target's, as docs/what-is-left.md explains it; tests solve the linear program for small vocabularies.

`first_token`, of one target token, is the optimum: the texts that begin with a token are a subtree of those that begin
with a shorter one, so tokens are served from the longest on. `tokens_per_pass`, of several, is a bound: 1 + E[sum over
j of min(1, G(u_1 … u_j) / P(u_1 … u_j))], u drawn from the target, G the probability that a draft's text begins so.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.session.models import tokenization_of
from crossdraft.text.letters import AFTER_ALL, NOTHING, Letters, Side
from crossdraft.types.rows import Probabilities

TOGETHER = 32  # contexts
NEWEST = 64  # tokens of a context that a model reads
OPEN = 4e-3  # mass of a text that is not followed further: it counts as one that any token may begin with


def first_token(p: Mapping[Letters, float], drafts: Mapping[Letters, float]) -> float:
    """Max P(the target's token lies within the draft's text), over all couplings of the two."""
    texts = sorted(drafts)
    left = np.array([drafts[text] for text in texts])
    total = 0.0
    for token in sorted(p, key=len, reverse=True):
        first = bisect_left(texts, token)
        end = bisect_left(texts, token + AFTER_ALL, first)
        served = min(p[token], float(left[first:end].sum()))
        left[first:end] -= np.diff(np.minimum(np.cumsum(left[first:end]), served), prepend=0.0)
        total += served
    return total


class Reader:
    """A model that is asked for distributions after texts, without cache, engine and service."""

    def __init__(self, name: str, side: Side) -> None:
        loaded = load_model(LoadOptions(name, dtype="float32", device="cpu"))
        self._model = loaded.model
        self.tokenization = tokenization_of(loaded.description, side)
        self.vocabulary = self.tokenization.vocabulary

    def logits(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """After each of these ids, float64 (n, V)."""
        kept = [ids[-NEWEST:] for ids in contexts]
        groups = [kept[place : place + TOGETHER] for place in range(0, len(kept), TOGETHER)]
        with torch.inference_mode():
            return torch.cat([self._last(group) for group in groups])

    def _last(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        fed = pad_sequence([torch.tensor(ids) for ids in contexts], batch_first=True)
        hidden = self._model.base_model(fed).last_hidden_state
        ends = torch.tensor([len(ids) - 1 for ids in contexts])
        found: torch.Tensor = self._model.get_output_embeddings()(hidden[torch.arange(len(contexts)), ends]).double()
        return found

    def rows(self, contexts: Sequence[tuple[int, ...]]) -> Probabilities:
        """The distributions after each of these ids, float64 (n, V)."""
        found: Probabilities = self.logits(contexts).softmax(-1).numpy()
        return found

    def ids(self, text: Letters) -> tuple[int, ...]:
        return self.tokenization.encode_prompt_letters(text)


@dataclass(frozen=True)
class Text:
    """What was drawn from the target after a context."""

    context: Letters
    ends: tuple[Letters, ...]  # the letters of its first tokens, one, two, …
    chances: tuple[float, ...]  # of these tokens


def drawn(target: Reader, contexts: Sequence[Letters], tokens: int, random: np.random.Generator) -> list[Text]:
    """One text after each context, at temperature 1."""
    texts = [Text(context, (), ()) for context in contexts]
    for _ in range(tokens):
        rows = target.rows([target.ids(Letters(text.context + "".join(text.ends[-1:]))) for text in texts])
        for place, (text, row) in enumerate(zip(texts, rows, strict=True)):
            token = int(random.choice(len(row), p=row / row.sum()))
            end = Letters("".join(text.ends[-1:]) + target.vocabulary.letters[token])
            chance = float(row[token]) * (text.chances[-1] if text.chances else 1.0)
            texts[place] = Text(text.context, (*text.ends, end), (*text.chances, chance))
    return texts


def begun(drafter: Reader, text: Text, k: int) -> Probabilities:
    """P(the text of a draft begins with each of the text's ends), of drafts of 1 to k tokens: float64 (k, n).

    The drafter's row after a text is taken to be that after the text as its tokenizer writes it, however the draft came
    to it.
    """
    whole, order = text.ends[-1], drafter.vocabulary.trie.order
    rows = drafter.rows([drafter.ids(Letters(text.context + whole[:place])) for place in range(len(whole))])
    ways = np.zeros((len(whole) + 1, k + 1))  # by letters and draft tokens
    ways[0, 0] = 1.0
    found = np.zeros((k, len(text.ends)))
    for place in range(len(whole)):
        if not ways[place].any():
            continue
        sums = np.concatenate([np.zeros(1), np.cumsum(rows[place][order])])
        reached = np.cumsum(ways[place, :k])
        for number, beginning in enumerate(text.ends):
            if len(beginning) > place:
                first, end = drafter.vocabulary.trie.span(Letters(beginning[place:]))
                found[:, number] += reached * (sums[end] - sums[first])
        for end in range(place + 1, min(len(whole), place + drafter.vocabulary.longest) + 1):
            tokens = drafter.vocabulary.ids_of(Letters(whole[place:end]))
            ways[end, 1:] += ways[place, :-1] * sum(rows[place][token] for token in tokens)
    return found


def tokens_per_pass(texts: Sequence[Text], chances: Sequence[Probabilities], drafts: int = 1) -> tuple[float, float]:
    """The bound of a round with so many drafts, however they are chosen, and its standard error. `texts`: from the
    target. `chances`: P(a draft's text begins with each of the text's ends), float64 (n,)."""
    terms = [np.minimum(1.0, drafts * g / np.array(text.chances)).sum() for text, g in zip(texts, chances, strict=True)]
    return 1 + float(np.mean(terms)), float(np.std(terms, ddof=1) / len(terms) ** 0.5)


def texts_of(
    drafter: Reader, context: Letters, wanted: Iterable[Letters], k: int
) -> tuple[dict[Letters, float], float]:
    """The texts of a draft of k tokens, as far as these target tokens need them, and the mass that was not followed."""
    beginnings = {token[:size] for token in wanted for size in range(1, len(token))}
    leaves: dict[Letters, float] = {}
    following: list[tuple[Letters, tuple[int, ...], float]] = [(NOTHING, (), 1.0)]
    left = 0.0
    for depth in range(k):
        heavy = [node for node in following if node[2] > OPEN or not depth]
        left += sum(mass for _, _, mass in following) - sum(mass for _, _, mass in heavy)
        if not heavy:
            break
        rows = drafter.rows([(*drafter.ids(context), *path) for _, path, _ in heavy])
        following = []
        for (text, path, mass), after in zip(heavy, rows, strict=True):
            for token in np.flatnonzero(after > 1e-9).tolist():
                longer = Letters(text + drafter.vocabulary.letters[token])
                if longer in beginnings and depth < k - 1:
                    following.append((longer, (*path, token), mass * after[token]))
                else:
                    leaves[longer] = leaves.get(longer, 0.0) + mass * after[token]
    return leaves, left
