"""Looking up how a text went on when its last letters were seen before (prompt look-up, an n-gram drafter)."""

from dataclasses import dataclass

from crossdraft.text.letters import FIRST_CONTROL, NOTHING, Letters


@dataclass(frozen=True)
class Lengths:
    """How many letters must match. A token of usual vocabularies has about four.

    Raises:
        ValueError: a length is out of its range.
    """

    longest: int = 24  # letters; longer matches are not told apart: the newest is taken
    shortest: int = 4  # letters

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                "match lengths are in letters: the shortest must be at least 1 and at most the longest, "
                f"got {self.shortest} and {self.longest}"
            )


def continuation(text: Letters, count: int, lengths: Lengths) -> Letters:
    """At most `count` letters that followed the longest match of the text's end, and the newest of several.

    A match at the text's own end goes round: what follows it is what is being copied. Control symbols do not match and
    are not copied.
    """
    start = _found(text, lengths)
    if start is None:
        return NOTHING
    followed = text[start : start + count]
    followed *= -(-count // len(followed))  # all of it was copied if it is too short: the text ends there
    return plain_beginning(Letters(followed[:count]))


def plain_beginning(letters: Letters) -> Letters:
    """The letters before the first control symbol."""
    end = next((place for place, letter in enumerate(letters) if ord(letter) >= FIRST_CONTROL), len(letters))
    return Letters(letters[:end])


def _found(text: Letters, lengths: Lengths) -> int | None:
    """Where the letters after the match begin. If n letters match, so do fewer: the longest is found by bisection."""
    ending = Letters(text[-lengths.longest :][::-1])
    least, most = lengths.shortest, len(plain_beginning(ending))
    found = None
    while least <= most:
        # At first the fewest letters: where they do not match, nothing does.
        size = lengths.shortest if found is None else (least + most + 1) // 2
        place = text.rfind(text[-size:], 0, len(text) - 1)
        if place < 0 and found is None:
            return None
        if place < 0:
            most = size - 1
        else:
            found, least = place + size, size + 1
    return found
