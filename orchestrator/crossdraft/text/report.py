"""What two tokenizers have in common: the compatibility report of a pair."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from crossdraft.text.combinations import Combinations, combinations_of, quartiles
from crossdraft.text.composition import Pieces
from crossdraft.text.letters import Letters, from_bytes, is_plain
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import NotExpressible, Tokenization
from crossdraft.text.vocabulary import Vocabulary

TEST_STRINGS = (
    "Hello, world! It's 12345.67 o'clock, isn't it?",
    "  leading and trailing blanks  \n\n\ttabs and\r\nlines\n",
    "def f(x: int) -> str:\n    return f'{x!r:>8}'  # café",
    "Größe naïve façade, Привет, мир, 你好世界, こんにちは, مرحبا",
    "🦄🚀 e\u0301 ﬁ İ \u200d \ufeff ▁ <0x41>",
)


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
        """Whether every string was restored."""
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
class CompatibilityReport:
    """What `compare` found; `dataclasses.asdict` makes JSON of it.

    |T| and |D| count different letter strings, T∩D those that both have; control symbols count by role.
    """

    same_vocabulary: bool  # all of the checks
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
    target_lengths: Lengths
    drafter_lengths: Lengths
    look_ahead: int  # n_max: most draft tokens that can be needed to have a whole target token
    combinations: Combinations


def compare(target: Tokenization, drafter: Tokenization, sample: str) -> CompatibilityReport:
    """Compares two tokenizers; `sample` is text of the kind that will be served."""
    checks = _checks(target, drafter)
    ours, theirs = _strings(target.vocabulary), _strings(drafter.vocabulary)
    shared = ours & theirs
    plain, drafted = _plain(target.vocabulary), _plain(drafter.vocabulary)
    pieces = Pieces(drafted)
    found = [pieces.compositions(letters) for letters in plain]
    return CompatibilityReport(
        same_vocabulary=all(check.same for check in checks),
        checks=checks,
        target_strings=len(ours),
        drafter_strings=len(theirs),
        shared=len(shared),
        shared_of_target=_ratio(len(shared), len(ours)),
        shared_of_drafter=_ratio(len(shared), len(theirs)),
        sample=_sample_share(target, drafter, sample, shared),
        target_written_by_drafter=_ratio(sum(one.count > 0 for one in found), len(found)),
        drafter_written_by_target=_written(drafted, Pieces(plain)),
        target_injectivity=_injectivity(target, sample),
        drafter_injectivity=_injectivity(drafter, sample),
        target_lengths=_lengths(plain),
        drafter_lengths=_lengths(drafted),
        look_ahead=max((one.look_ahead for one in found), default=0),
        combinations=combinations_of(list(map(len, plain)), [one.count for one in found]),
    )


def _checks(target: Tokenization, drafter: Tokenization) -> tuple[Check, ...]:
    ours, theirs = target.vocabulary, drafter.vocabulary
    size = "" if ours.size == theirs.size else f"{ours.size} and {theirs.size} ids"
    found = {
        "size": size,
        "id map": size or _first_id_that_differs(ours, theirs),
        "special tokens": _special_difference(ours, theirs),
        "encodings": _first_difference(lambda text: target.encode_prompt(text) == drafter.encode_prompt(text)),
        "decodings": size or _first_difference(lambda text: _decode_alike(target, drafter, target.encode_prompt(text))),
    }
    return tuple(Check(name, not detail, detail) for name, detail in found.items())


def _first_id_that_differs(ours: Vocabulary, theirs: Vocabulary) -> str:
    if Pair(ours, theirs).same_vocabulary:
        return ""
    control = {token for token, _ in (*ours.nameless, *theirs.nameless)}
    for token, (one, other) in enumerate(zip(ours.letters, theirs.letters, strict=True)):
        if token not in control and one != other:
            return f"id {token} is {one!r} and {other!r}"
    return ""


def _special_difference(ours: Vocabulary, theirs: Vocabulary) -> str:
    for name, one, other in (
        ("with a role", ours.controls, theirs.controls),
        ("without a role", ours.nameless, theirs.nameless),
        ("that stop", sorted(ours.stops), sorted(theirs.stops)),
    ):
        if one != other:
            return f"ids {name} differ, such as {next(iter({*one} ^ {*other}))!r}"
    return ""


def _first_difference(alike: Callable[[str], bool]) -> str:
    return next((f"of {text!r}" for text in TEST_STRINGS if not alike(text)), "")


def _decode_alike(target: Tokenization, drafter: Tokenization, ids: Sequence[int]) -> bool:
    return target.shown(ids) == drafter.shown(ids)


def _strings(vocabulary: Vocabulary) -> frozenset[Letters]:
    without_role = {token for token, _ in vocabulary.nameless}
    return frozenset(letters for token, letters in enumerate(vocabulary.letters) if token not in without_role)


def _plain(vocabulary: Vocabulary) -> list[Letters]:
    return [letters for letters in _strings(vocabulary) if is_plain(letters)]


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
    written = [tokenization.vocabulary.letters[token] for token in tokenization.encode_prompt(sample)]
    return [letters for letters in written if is_plain(letters)]


def _written(strings: Sequence[Letters], pieces: Pieces) -> float:
    return _ratio(sum(map(pieces.can_write, strings)), len(strings))


def _injectivity(tokenization: Tokenization, sample: str) -> Injectivity:
    strings = [line for line in (*sample.splitlines(keepends=True), *TEST_STRINGS) if line]
    lost = [text for text in strings if not _restores(tokenization, from_bytes(text.encode()))]
    return Injectivity(len(strings), len(strings) - len(lost), next(iter(lost), ""), tokenization.lossy)


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
