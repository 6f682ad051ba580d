"""Letters: the common language of all vocabularies.

A letter is a byte or one control symbol. A string of letters is a Python `str` with one
character a letter: U+0000..U+00FF is the byte of that value, everything above is a control
symbol. So prefixes, slices, hashes and dictionaries are those of `str`, and offsets count letters.
"""

from enum import Enum
from typing import NewType

Letters = NewType("Letters", str)

NOTHING = Letters("")
FIRST_CONTROL = 0x100
NAMELESS = 0xFFFF  # control symbols without a role that one side can have; the code point behind the last is AFTER_ALL
AFTER_ALL = Letters("\U0010ffff")  # above every letter, and none


class Role(Enum):
    """What a control symbol is for; symbols of two models are the same letter only by role."""

    END_OF_SEQUENCE = 0xE000
    END_OF_TURN = 0xE001
    BEGIN_OF_SEQUENCE = 0xE002

    @property
    def letter(self) -> Letters:
        return Letters(chr(self.value))


class Side(Enum):
    """Whose vocabulary; the value is where its control symbols without a role begin."""

    TARGET = 0xF0000
    DRAFTER = 0x100000

    def control(self, rank: int) -> Letters:
        """The letter of this side's `rank`-th control symbol without a role (below NAMELESS); never the other's."""
        return Letters(chr(self.value + rank))


def from_bytes(raw: bytes) -> Letters:
    """Bytes as letters."""
    return Letters(raw.decode("latin-1"))


def is_plain(letters: Letters) -> bool:
    """Whether there is no control symbol in it."""
    return not letters or ord(max(letters)) < FIRST_CONTROL


def to_bytes(letters: Letters) -> bytes:
    """The bytes of the letters; control symbols are left out (they are not text)."""
    return letters.encode("latin-1", "ignore")


def common_length(one: str, other: str) -> int:
    """How many letters two strings of letters have in common at their start."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
