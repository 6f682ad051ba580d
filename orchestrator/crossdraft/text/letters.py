"""Letters: the common language of all vocabularies.

A letter is a byte or one control symbol. A string of letters is a Python `str` with one
character a letter: U+0000..U+00FF is the byte of that value, everything above is a control
symbol. So prefixes, slices, hashes and dictionaries are those of `str`, and offsets count letters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

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


# Letters as small numbers, so that numpy can see at once how many tokens go on.

Ids = NDArray[np.int64]
Codes = NDArray[np.uint16]
END = FIRST_CONTROL  # no letter has this number: the token is over
_NAMELESS = END + 1 + len(Role)
EVENTS = _NAMELESS + len(Side)  # what can come next: a byte, the end, a role, a control symbol of either side
_OF_ROLE = {role.value: END + 1 + place for place, role in enumerate(Role)}


def coding() -> str:
    """All that codes depend on besides the letters; codes that are kept are good for this coding only."""
    return repr((END, _NAMELESS, EVENTS, _OF_ROLE, [side.value for side in Side]))


def codes_of(letters: str) -> Codes:
    """One code a letter, shape (len(letters),); a byte's code is the byte, that of U+0100 is END.

    All control symbols without a role of one side have one code. Only their side can write them, and each is a token
    of its own, so what the other side can tell apart stays apart.
    """
    points = np.frombuffer(letters.encode("utf-32-le"), dtype="<u4")
    codes: Codes = np.minimum(points, EVENTS).astype(np.uint16)
    for place in np.flatnonzero(points > END).tolist():
        point = int(points[place])
        codes[place] = _OF_ROLE.get(point, _NAMELESS + (point >= Side.DRAFTER.value))
    return codes


def spelled(strings: Sequence[Letters]) -> Codes:
    """The codes of all strings, none of them empty, with END after each."""
    return codes_of(chr(END).join([*strings, ""]))


@dataclass(frozen=True, eq=False)
class Spelling:
    """The codes of all strings of a vocabulary in one array."""

    codes: Codes  # string after string, END after each
    starts: Ids  # shape (V + 1,), where each id's string begins, and the end of all

    @staticmethod
    def read(codes: Codes) -> "Spelling":
        """Of what `spelled` made."""
        codes.flags.writeable = False
        return Spelling(codes, np.append(0, np.flatnonzero(codes == END) + 1))

    def rest(self, token: int, cursor: int) -> Codes:
        """The codes from a place in an id's string to the string's end."""
        return self.codes[cursor : int(self.starts[token + 1]) - 1]
