"""Letters, the alphabet that all vocabularies share: bytes and control symbols.

A string of letters is a Python `str` with one character per letter: U+0000 to U+00FF is the byte of that value,
anything above is a control symbol. Prefixes, slices and hashes are those of `str`, and offsets count letters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Letters = NewType("Letters", str)
NOTHING = Letters("")
FIRST_CONTROL = 0x100
NAMELESS = 0xFFFF  # max control symbols without a role of one side; the code point after the last is AFTER_ALL
AFTER_ALL = Letters("\U0010ffff")  # above every letter, and not a letter


class ControlRole(Enum):
    """The role of a control symbol; control symbols of two models are the same letter if they have the same role."""

    END_OF_SEQUENCE = 0xE000
    END_OF_TURN = 0xE001
    BEGIN_OF_SEQUENCE = 0xE002

    @property
    def letter(self) -> Letters:
        return Letters(chr(self.value))


class Side(Enum):
    """Whose vocabulary; the value is the code point of its first control symbol without a role."""

    TARGET = 0xF0000
    DRAFTER = 0x100000

    def control(self, rank: int) -> Letters:
        """The letter of this side's `rank`-th control symbol without a role; `rank` is below NAMELESS."""
        return Letters(chr(self.value + rank))


_ROLES = "".join(role.letter for role in ControlRole)
NO_LETTER = re.compile(f"[^\x00-\xff{_ROLES}{Side.TARGET.control(0)}-{AFTER_ALL}]")  # a character that is none


def from_bytes(raw: bytes) -> Letters:
    return Letters(raw.decode("latin-1"))


def is_plain(letters: Letters) -> bool:
    return not letters or ord(max(letters)) < FIRST_CONTROL


def to_bytes(letters: Letters) -> bytes:
    """The bytes of the letters, without control symbols."""
    return letters.encode("latin-1", "ignore")


def common_length(text: str, other: str) -> int:
    shorter = min(len(text), len(other))
    if text[:shorter] == other[:shorter]:  # the usual case
        return shorter
    for place, (left, right) in enumerate(zip(text, other, strict=False)):
        if left != right:
            return place
    return shorter


# Letters as small integers ("codes"), so that numpy can compare the next letters of many tokens at once.

Ids = NDArray[np.int64]
Codes = NDArray[np.uint16]
END = FIRST_CONTROL  # the end of a token; no letter has this code
_NAMELESS = END + 1 + len(ControlRole)
EVENTS = _NAMELESS + len(Side)  # number of codes: bytes, END, roles, control symbols without a role of either side
_OF_ROLE = {role.value: END + 1 + place for place, role in enumerate(ControlRole)}


def codes_of(letters: str) -> Codes:
    """One code per letter, uint16 (len(letters),); a byte's code is the byte, that of U+0100 is END.

    All control symbols without a role of one side share one code: only that side can write them, and each is a token of
    its own, so that the other side need not tell them apart.
    """
    points = np.frombuffer(letters.encode("utf-32-le"), dtype="<u4")
    codes: Codes = np.minimum(points, EVENTS).astype(np.uint16)
    for place in np.flatnonzero(points > END).tolist():
        point = int(points[place])
        codes[place] = _OF_ROLE.get(point, _NAMELESS + (point >= Side.DRAFTER.value))
    return codes


@dataclass(frozen=True, eq=False)
class Spelling:
    """The codes of all tokens of a vocabulary in one array."""

    codes: Codes  # string after string, END after each
    starts: Ids  # shape (V + 1,), index where each id's string begins, and the end

    @staticmethod
    def of(strings: Sequence[Letters]) -> "Spelling":
        """No string is empty."""
        codes = codes_of(chr(END).join([*strings, ""]))
        codes.flags.writeable = False
        return Spelling(codes, np.append(0, np.flatnonzero(codes == END) + 1))

    def rest(self, token: int, cursor: int) -> Codes:
        """The codes of an id's string from index `cursor` on, without END."""
        return self.codes[cursor : int(self.starts[token + 1]) - 1]
