"""Which tokens of a growing text can no longer change."""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence

from tokenizers import Encoding, Tokenizer

from crossdraft.text.anatomy import Anatomy
from crossdraft.text.letters import from_bytes, is_plain
from crossdraft.text.vocabulary import Vocabulary

_WINDOW = 32  # tokens that are encoded again to see what a longer text may do to them


class Boundaries:
    """Finds how far the encoding of a text is settled, by one of two arguments.

    Tokenizers that split into words: no pattern in use looks past a blank after a word, so that what lies before
    the blank is settled.

    BPE without words: take the encoding of any longer text. At most one of its tokens straddles the end of ours, and
    the tokens before it are the encoding of the text before it (a prefix of an encoding is an encoding). So what all
    encodings of text[:j] have in common, over every j where a longer token may begin, is settled.
    """

    def __init__(self, anatomy: Anatomy, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._anatomy = anatomy
        self._tokenizer = tokenizer
        self._added = sorted(added.content for added in anatomy.added if not added.special)
        self._sorted = sorted(letters for letters in set(vocabulary.letters) if is_plain(letters))
        self._longest = max((len(letters) for letters in self._sorted), default=0)

    def stable(self, text: str, encoding: Encoding) -> int:
        """How many leading tokens of the text's encoding stay whatever text is appended."""
        if self._anatomy.splits:
            return self._by_words(text, encoding)
        if self._anatomy.pairwise and not self._anatomy.lossy:
            return self._by_pairs(text, encoding)
        return 0

    def _by_words(self, text: str, encoding: Encoding) -> int:
        end = self._added_may_begin(text)
        words, offsets = encoding.word_ids, encoding.offsets
        for place in range(len(words) - 1, 0, -1):
            start = offsets[place][0]
            if words[place] != words[place - 1] and start <= end and _is_settled(text, start):
                return place
        return 0

    def _added_may_begin(self, text: str) -> int:
        """The first place where an added token may begin that the end of the text has not decided."""
        longest = max(map(len, self._added), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            if _some_begin_with(self._added, text[start:], longer=False):
                return start
        return len(text)

    def _by_pairs(self, text: str, encoding: Encoding) -> int:
        stable = len(encoding.ids)
        raw = from_bytes(text.encode())
        cuts = {
            len(from_bytes(text[:place].encode())): place
            for place in range(max(0, len(text) - self._longest), len(text))
        }
        for start in range(max(0, len(raw) - self._longest), len(raw)):
            if not _some_begin_with(self._sorted, raw[start:], longer=True):
                continue
            if start in cuts:
                stable = min(stable, self._agreement(text, encoding, cuts[start]))
            elif self._anatomy.byte_level:
                return 0  # a token may begin inside a character, where no text ends
        return stable

    def _agreement(self, text: str, encoding: Encoding, end: int) -> int:
        """How many leading tokens the encodings of text[:end] and of the text share.

        A sequence is an encoding if its neighbours are, two by two. So a window's encoding that begins with
        the window's own first token goes on from what is before the window; otherwise the window is widened.
        """
        ids, offsets = encoding.ids, encoding.offsets
        width = _WINDOW
        while True:
            first = max(0, len(ids) - width)
            while first and (offsets[first][0] < offsets[first - 1][1] or offsets[first][0] >= end):
                first -= 1
            again = self._tokenizer.encode(text[offsets[first][0] : end], add_special_tokens=False).ids
            if first == 0 or again[:1] == [ids[first]]:
                return first + common_length(again, ids[first:])
            width *= 2


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading elements are equal."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _some_begin_with(ordered: Sequence[str], beginning: str, longer: bool) -> bool:
    """Whether some string of a sorted list begins with this one, itself not counted if `longer`."""
    place = bisect_right(ordered, beginning)
    return (place < len(ordered) and ordered[place].startswith(beginning)) or (
        not longer and place > 0 and ordered[place - 1] == beginning
    )


def _is_settled(text: str, start: int) -> bool:
    """Whether a word that ends before `start` ends there in every longer text."""
    left, right = text[start - 1], text[start]
    if right.isspace():
        return not left.isspace()
    # an apostrophe may begin a contraction that belongs to the word
    return left.isalpha() and unicodedata.category(right)[0] in "PS" and right not in "'’"
