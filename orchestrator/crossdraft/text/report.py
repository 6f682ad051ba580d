"""The compatibility report of a pair of tokenizers."""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from statistics import fmean, pstdev

from crossdraft.text.letters import Letters, from_bytes, is_plain
from crossdraft.text.pairs import Pair, first_difference
from crossdraft.text.tokenization import NotExpressible, Tokenization
from crossdraft.text.vocabulary import Vocabulary

TEST_STRINGS = (
    "Hello, world! It's 12345.67 o'clock, isn't it?",
    "  leading and trailing blanks  \n\n\ttabs and\r\nlines\n",
    "def f(x: int) -> str:\n    return f'{x!r:>8}'  # café",
    "Größe naïve façade, Привет, мир, 你好世界, こんにちは, مرحبا",
    "🦄🚀 e\u0301 ﬁ İ \u200d \ufeff ▁ <0x41>",
)
# Strings of random characters, beside lines of the sample, whose decoding is compared with them.
RANDOM_STRINGS = 256
PREFIX = 100  # characters of a string, as in arXiv 2502.05202, appendix F
RANGES = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x4E00, 0x9FA6), (0x1F300, 0x1F650))


@dataclass(frozen=True)
class Check:
    """One of the conditions of being the same vocabulary."""

    name: str
    same: bool
    detail: str  # the first difference, or empty


@dataclass(frozen=True)
class Injectivity:
    """Whether tokenizing loses anything of a sample."""

    strings: int  # that were tried: the lines of the sample and the test strings
    restored: int  # whose tokens have exactly their letters
    example: str  # the first one that is not restored, or empty
    lossy_parts: tuple[str, ...]  # parts of the tokenizer that change text, by the names in tokenizer.json

    @property
    def holds(self) -> bool:
        return self.strings == self.restored


@dataclass(frozen=True)
class Lengths:
    """Of the tokens that are text, in letters."""

    mean: float
    deviation: float  # standard, of all of them
    quartiles: tuple[int, int, int]
    longest: int


@dataclass(frozen=True)
class SampleShare:
    """How much of a sample the two vocabularies share, by token and by kind of token; control symbols left out.

    T′ and D′ are the different tokens that occur when target and drafter tokenize the sample.
    """

    target_tokens: float  # share of the target's tokens in it that are in T∩D
    drafter_tokens: float  # share of the drafter's tokens in it that are in T∩D
    target_kinds: int  # |T′|
    drafter_kinds: int  # |D′|
    shared_kinds: int  # |T′∩D′|
    shared_of_target: float  # |T′∩D′| / |T′|: Table 6 of arXiv 2502.05202


@dataclass(frozen=True)
class Combinations:
    """Sequences of draft tokens that are exactly one target token, over the target tokens that have any (arXiv
    2502.05202, section D). They grow like 2 to the token's length: they are counted in integers of any size, and
    reported as logarithms."""

    tokens: int  # that have any
    quartiles: tuple[int, int, int]  # the second is the median
    log10_of_mean: float
    log10_of_deviation: float  # standard, of all of them; 0 if there is none
    log10_of_largest: float


@dataclass(frozen=True)
class CompatibilityReport:
    """What `compare` found; `dataclasses.asdict` makes JSON of it.

    |T| and |D| count different letter strings, T∩D those that both have; control symbols count by role.
    """

    same_vocabulary: bool  # as of `Pair`: the id map is the same; the other checks say in what else they differ
    checks: tuple[Check, ...]
    target_strings: int  # |T|
    drafter_strings: int  # |D|
    shared: int  # |T∩D|
    shared_of_target: float  # |T∩D| / |T|
    shared_of_drafter: float  # |T∩D| / |D|
    sample: SampleShare
    target_written_by_drafter: float  # share of T's texts that are concatenations of D's
    drafter_written_by_target: float
    target_injectivity: Injectivity
    drafter_injectivity: Injectivity
    target_decoding: Injectivity  # whether decoding what was encoded gives the string again: its Table 9
    drafter_decoding: Injectivity
    target_unknown: tuple[str, ...]  # different parts of sample and test strings that its unknown token stands for
    drafter_unknown: tuple[str, ...]
    target_lengths: Lengths
    drafter_lengths: Lengths
    look_ahead: int  # n_max: most draft tokens that can be needed to have a whole target token
    combinations: Combinations
    forwards: Combinations  # the same of the drafter's forwards that ψ of one target token needs
    by_length: tuple[tuple[int, int, float, float], ...]  # letters, target tokens, mean combinations, mean forwards


def compare(target: Tokenization, drafter: Tokenization, sample: str, longest: int = 0) -> CompatibilityReport:
    """Compares two tokenizers, on a sample of the kind of text that will be served. `longest`: letters of the target
    tokens whose combinations are counted, at most; 0: all."""
    ours, theirs = strings_of(target.vocabulary), strings_of(drafter.vocabulary)
    shared = ours & theirs
    plain, drafted = plain_strings(target.vocabulary), plain_strings(drafter.vocabulary)
    pieces = Pieces(drafted)
    found = {letters: pieces.compositions(letters) for letters in plain}
    counted = {
        letters: ways for letters, ways in found.items() if ways.count and len(letters) <= (longest or len(letters))
    }
    return CompatibilityReport(
        same_vocabulary=Pair(target.vocabulary, drafter.vocabulary).same_vocabulary,
        checks=_checks(target, drafter),
        target_strings=len(ours),
        drafter_strings=len(theirs),
        shared=len(shared),
        shared_of_target=_ratio(len(shared), len(ours)),
        shared_of_drafter=_ratio(len(shared), len(theirs)),
        sample=_sample_share(target, drafter, sample, shared),
        target_written_by_drafter=_ratio(sum(ways.count > 0 for ways in found.values()), len(found)),
        drafter_written_by_target=_ratio(sum(map(Pieces(plain).can_write, drafted)), len(drafted)),
        target_injectivity=_injectivity(target, sample),
        drafter_injectivity=_injectivity(drafter, sample),
        target_decoding=decoding(target, sample),
        drafter_decoding=decoding(drafter, sample),
        target_unknown=_unknown(target, sample),
        drafter_unknown=_unknown(drafter, sample),
        target_lengths=_lengths(plain),
        drafter_lengths=_lengths(drafted),
        look_ahead=max((ways.look_ahead for ways in found.values()), default=0),
        combinations=combinations_of([ways.count for ways in counted.values()]),
        forwards=combinations_of([ways.forwards for ways in counted.values()]),
        by_length=_by_length(counted),
    )


def _by_length(counted: Mapping[Letters, "Compositions"]) -> tuple[tuple[int, int, float, float], ...]:
    alike = defaultdict[int, list[Compositions]](list)
    for letters, ways in counted.items():
        alike[len(letters)].append(ways)
    return tuple(
        (length, len(ones), _mean([one.count for one in ones]), _mean([one.forwards for one in ones]))
        for length, ones in sorted(alike.items())
    )


def _mean(counts: Sequence[int]) -> float:
    """Of integers that may be too large for a float."""
    return sum(counts) / len(counts) if sum(counts).bit_length() < 1000 else float("inf")


def _checks(target: Tokenization, drafter: Tokenization) -> tuple[Check, ...]:
    ours, theirs, token = target.vocabulary, drafter.vocabulary, first_difference(target.vocabulary, drafter.vocabulary)
    here, there = ("".join(one.letters[token : token + 1]) if token is not None else "" for one in (ours, theirs))
    special = {
        "with a role": ({*ours.controls}, {*theirs.controls}),
        "without a role": ({*ours.nameless}, {*theirs.nameless}),
        "that stop": (ours.stops, theirs.stops),
    }
    texts = {text: target.encode_prompt(text) for text in TEST_STRINGS}
    found: dict[str, Iterable[str]] = {
        "size": [f"{ours.size} and {theirs.size} ids"] if ours.size != theirs.size else [],
        "id map": [f"id {token} is {here!r} and {there!r}"] if token is not None else [],
        "special tokens": (
            f"ids {what} differ, such as {min(a ^ b, key=str)!r}" for what, (a, b) in special.items() if a != b
        ),
        "encodings": (f"of {text!r}" for text, ids in texts.items() if ids != drafter.encode_prompt(text)),
        "decodings": (f"of {text!r}" for text, ids in texts.items() if target.shown(ids) != drafter.shown(ids)),
    }
    details = {name: next(iter(differences), "") for name, differences in found.items()}
    return tuple(Check(name, not detail, detail) for name, detail in details.items())


def strings_of(vocabulary: Vocabulary) -> frozenset[Letters]:
    without_role = {token for token, _ in vocabulary.nameless}
    return frozenset(letters for token, letters in enumerate(vocabulary.letters) if token not in without_role)


def plain_strings(vocabulary: Vocabulary) -> list[Letters]:
    return [letters for letters in strings_of(vocabulary) if is_plain(letters)]


def _sample_share(target: Tokenization, drafter: Tokenization, sample: str, shared: frozenset[Letters]) -> SampleShare:
    ours, theirs = _texts_of(target, sample), _texts_of(drafter, sample)
    kinds, drafted = set(ours), set(theirs)
    return SampleShare(
        target_tokens=_ratio(sum(letters in shared for letters in ours), len(ours)),
        drafter_tokens=_ratio(sum(letters in shared for letters in theirs), len(theirs)),
        target_kinds=len(kinds),
        drafter_kinds=len(drafted),
        shared_kinds=len(kinds & drafted),
        shared_of_target=_ratio(len(kinds & drafted), len(kinds)),
    )


def _texts_of(tokenization: Tokenization, sample: str) -> list[Letters]:
    written = [tokenization.vocabulary.letters[token] for token in tokenization.encode_prompt(sample, leave_out=True)]
    return [letters for letters in written if is_plain(letters)]


@dataclass(frozen=True)
class Compositions:
    """The ways to write one string as a concatenation of pieces."""

    count: int  # exact concatenations; grows like 2 to the string's length
    # Sequences of pieces, none of them too, that some concatenation begins with: the forwards after which its next
    # piece's probability is known. 0: there is no concatenation.
    forwards: int
    look_ahead: int  # most pieces that can be needed until their concatenation begins with the string; 0: impossible


class Pieces:
    """The strings of a vocabulary, as pieces to write other strings with."""

    def __init__(self, strings: Collection[Letters]) -> None:
        self._known = frozenset(strings)
        self._ordered = sorted(self._known)
        self._longest = max(map(len, self._known), default=0)

    def can_write(self, string: Letters) -> bool:
        if string in self._known or self._known.issuperset(string):
            return True
        return self.compositions(string).count > 0

    def compositions(self, string: Letters) -> Compositions:
        """All ways to write the string: O(length²) look-ups."""
        length = len(string)
        ways = [1] + [0] * length
        most = [0] * (length + 1)  # pieces on the longest way to each offset
        for end in range(1, length + 1):
            for start in range(max(0, end - self._longest), end):
                if ways[start] and string[start:end] in self._known:
                    ways[end] += ways[start]
                    most[end] = max(most[end], most[start] + 1)
        forwards = sum(ways[start] for start in self._ends(string) if start < length) if ways[length] else 0
        if most[length] == length:  # no sequence has more pieces than letters
            return Compositions(ways[length], forwards, length)
        beyond = [most[start] + 1 for start in range(length) if ways[start] and self._some_exceeds(string[start:])]
        return Compositions(ways[length], forwards, max([most[length], *beyond]))

    def _ends(self, string: Letters) -> set[int]:
        """The offsets after which the rest of the string can be written."""
        length = len(string)
        found = {length}
        for start in range(length - 1, -1, -1):
            if any(string[start:end] in self._known for end in found if end - start <= self._longest):
                found.add(start)
        return found

    def _some_exceeds(self, beginning: str) -> bool:
        place = bisect_right(self._ordered, beginning)
        return place < len(self._ordered) and self._ordered[place].startswith(beginning)


def _injectivity(tokenization: Tokenization, sample: str) -> Injectivity:
    strings = [line for line in (*sample.splitlines(keepends=True), *TEST_STRINGS) if line]
    return _lossless(tokenization, strings, lambda text: _restores(tokenization, from_bytes(text.encode())))


def decoding(tokenization: Tokenization, sample: str) -> Injectivity:
    """The test of arXiv 2502.05202, appendix F: decode(encode(s)) = s, by the tokenizer itself, without special tokens.

    Strings are the beginnings of the sample's lines and as many as RANDOM_STRINGS of random characters.
    """
    chance = random.Random(0)
    strings = [line[:PREFIX] for line in sample.splitlines() if line.strip()][:RANDOM_STRINGS]
    for _ in range(RANDOM_STRINGS):
        first, end = chance.choice(RANGES)
        strings.append("".join(chr(chance.randrange(first, end)) for _ in range(chance.randrange(1, PREFIX))))
    shown = tokenization.shown
    return _lossless(tokenization, strings, lambda text: shown(tokenization.encode_prompt(text, False, True)) == text)


def _lossless(tokenization: Tokenization, strings: Sequence[str], kept: Callable[[str], bool]) -> Injectivity:
    lost = [text for text in strings if not kept(text)]
    return Injectivity(len(strings), len(strings) - len(lost), next(iter(lost), ""), tokenization.lossy)


def _unknown(tokenization: Tokenization, sample: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part for text in (sample, *TEST_STRINGS) for part in tokenization.unknown(text)))


def _restores(tokenization: Tokenization, letters: Letters) -> bool:
    try:
        return tokenization.letters_of(tokenization.encode_continuation(letters)) == letters
    except NotExpressible:
        return False


def _lengths(strings: Sequence[Letters]) -> Lengths:
    sizes = sorted(map(len, strings)) or [0]
    return Lengths(fmean(sizes), pstdev(sizes), quartiles(sizes), sizes[-1])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def combinations_of(counts: Sequence[int]) -> Combinations:
    """The statistics of target tokens' ways to be written, shape (n,); 0: none."""
    every = sorted(filter(None, counts))
    if not every:
        return Combinations(0, (0, 0, 0), 0.0, 0.0, 0.0)
    size, total = len(every), sum(every)
    squared = size * sum(count * count for count in every) - total**2  # n²·variance = n·Σ x² − (Σ x)²
    deviation = log10(squared) / 2 - log10(size) if squared else 0.0
    return Combinations(size, quartiles(every), log10(total) - log10(size), deviation, log10(every[-1]))


def quartiles(values: Sequence[int]) -> tuple[int, int, int]:
    """The values at a quarter, a half and three quarters of `values`, which ascend; at least one."""
    first, second, third = (values[(len(values) - 1) * part // 4] for part in (1, 2, 3))
    return first, second, third
