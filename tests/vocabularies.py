"""Vocabularies of toys: a handful of tokens given by their letters, and a tokenizer over them.

All are immutable and cached: enumerations make the same ones for each of their branches.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from crossdraft.text.letters import FIRST_CONTROL, Letters, Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import Vocabulary


def toy_vocabulary(letters: Sequence[str], stops: frozenset[int] = frozenset()) -> Vocabulary:
    """A vocabulary from its letters; the content of a control symbol is its id."""
    controls = [(token, f"<{token}>", ord(text)) for token, text in enumerate(letters) if ord(text[0]) >= FIRST_CONTROL]
    return Vocabulary(
        letters=tuple(Letters(text) for text in letters),
        stops=stops,
        nameless=tuple((token, content) for token, content, point in controls if point >= Side.TARGET.value),
        names={token: content for token, content, _ in controls},
    )


def pair_of(target: Sequence[str], drafter: Sequence[str], stops: frozenset[int] = frozenset()) -> Pair:
    """A pair of toy vocabularies; stop ids are the target's."""
    return _pair(tuple(target), tuple(drafter), stops)


@lru_cache(maxsize=256)
def _pair(target: tuple[str, ...], drafter: tuple[str, ...], stops: frozenset[int]) -> Pair:
    return Pair(toy_vocabulary(target, stops), toy_vocabulary(drafter))


@lru_cache(maxsize=256)
def greedy_tokens(vocabulary: Vocabulary) -> Callable[[Letters], tuple[int, ...]]:
    """A tokenizer of toys: the longest token that fits, again and again; stops where none fits."""

    @lru_cache(maxsize=4096)
    def encode(letters: Letters) -> tuple[int, ...]:
        ids: list[int] = []
        while letters:
            fitting = [token for token, text in enumerate(vocabulary.letters) if letters.startswith(text)]
            if not fitting:
                break
            best = max(fitting, key=lambda token: len(vocabulary.letters[token]))
            ids.append(best)
            letters = Letters(letters[len(vocabulary.letters[best]) :])
        return tuple(ids)

    return encode
