"""Letters as small numbers, so that numpy can see at once how many tokens go on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, Side

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
