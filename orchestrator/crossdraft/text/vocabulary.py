"""A model's vocabulary: the letters of each token id."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from crossdraft.text.letters import NAMELESS, Letters, Role, Side
from crossdraft.text.tokenizer_file import Anatomy, anatomy_of


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The letters of every id of a model's row of logits.

    Several ids can have the same letters, such as the byte `<0x41>` and `A`. Their `rank` is their order by id, but
    tokens of a byte fallback come last, because a tokenizer writes them only if it has no other.
    """

    letters: tuple[Letters, ...]  # indexed by id; never an empty string
    controls: tuple[tuple[int, str], ...] = ()  # (id, role name) of the control symbols that have a role
    stops: frozenset[int] = frozenset()
    nameless: tuple[tuple[int, str], ...] = ()  # (id, content or "") of control symbols without a role
    fallback: frozenset[int] = frozenset()  # ids of byte-fallback tokens
    _ids: dict[Letters, tuple[int, ...]] = field(init=False, repr=False)
    _ranks: dict[int, int] = field(init=False, repr=False)  # only those above 0

    def __post_init__(self) -> None:
        grouped: dict[Letters, tuple[int, ...]] = {}
        usual = [token for token in range(len(self.letters)) if token not in self.fallback]
        for token in [*usual, *sorted(self.fallback)]:
            grouped[self.letters[token]] = (*grouped.get(self.letters[token], ()), token)
        ranks = {
            token: rank for tokens in grouped.values() if len(tokens) > 1 for rank, token in enumerate(tokens) if rank
        }
        object.__setattr__(self, "_ids", grouped)
        object.__setattr__(self, "_ranks", ranks)

    @staticmethod
    def build(
        tokenizer_json: str, size: int, controls: Sequence[tuple[int, str]], stops: Collection[int], side: Side
    ) -> "Vocabulary":
        """The vocabulary of a tokenizer.json.

        Args:
            tokenizer_json: the whole file's text.
            size: length of the model's logits row; ids beyond the tokenizer's become control symbols,
                ids of the tokenizer at or above it are left out.
            controls: (id, `Role` name) of the control symbols that have a role.
            stops: ids that end an output.
            side: whose vocabulary, for the control symbols without a role.

        Raises:
            TokenizerNotSupported: its tokens are not plain strings of letters.
            ValueError: a control or stop id is not below `size`, a role name is unknown, or more than NAMELESS ids
                are neither text nor a control symbol with a role.
        """
        _check_ids(size, controls, stops)
        anatomy = anatomy_of(tokenizer_json)
        known = _plain_letters(anatomy)
        known.update((token, Role[role].letter) for token, role in controls)
        _check_count(size, known)
        nameless = [token for token in range(size) if not known.get(token)]
        known.update((token, side.control(rank)) for rank, token in enumerate(nameless))
        contents = dict(anatomy.pieces) | {token.id: token.content for token in anatomy.added}
        bytes_only = {token for token, piece in anatomy.pieces if anatomy.is_byte_piece(piece) and token < size}
        return Vocabulary(
            letters=tuple(known[token] for token in range(size)),
            controls=tuple(sorted((int(token), role) for token, role in controls)),
            stops=frozenset(stops),
            nameless=tuple((token, contents.get(token, "")) for token in nameless),
            fallback=frozenset(bytes_only.difference(nameless, (token for token, _ in controls))),
        )

    @property
    def size(self) -> int:
        """Number of ids: the length of the model's logits row."""
        return len(self.letters)

    @cached_property
    def longest(self) -> int:
        """Letters of the longest token."""
        return max(map(len, self.letters), default=0)

    def ids_of(self, letters: Letters) -> tuple[int, ...]:
        """All ids with exactly these letters, by rank; empty if there is none."""
        return self._ids.get(letters, ())

    def rank(self, token: int) -> int:
        """Index of the id among the ids with the same letters."""
        return self._ranks.get(token, 0)

    def letters_of(self, ids: Iterable[int]) -> Letters:
        """The letters of a sequence of ids.

        Raises:
            IndexError: an id is not below the vocabulary's size.
        """
        return Letters("".join(map(self.letters.__getitem__, ids)))


def _check_ids(size: int, controls: Sequence[tuple[int, str]], stops: Collection[int]) -> None:
    for token in [*(token for token, _ in controls), *stops]:
        if not 0 <= token < size:
            raise ValueError(
                f"control or stop id {token} is not an id of a vocabulary of {size}; check the model's config"
            )
    for token, role in controls:
        if role not in Role.__members__:
            raise ValueError(f"id {token} has the unknown role {role!r}; the roles are {', '.join(Role.__members__)}")


def _check_count(size: int, known: Mapping[int, Letters]) -> None:
    """Checked before any list of `size` items is made: `size` comes from a config that may be wrong."""
    nameless = size - sum(0 <= token < size and letters != "" for token, letters in known.items())
    if nameless > NAMELESS:
        raise ValueError(
            f"{nameless} of {size} ids have no text in tokenizer.json, and at most {NAMELESS} may; "
            "check the model's vocabulary_size, and that the tokenizer.json is this model's"
        )


def _plain_letters(anatomy: Anatomy) -> dict[int, Letters]:
    """Letters of all tokens that are text; special tokens and the unknown token are left out."""
    letters = {token: anatomy.letters_of_piece(piece) for token, piece in anatomy.pieces}
    for added in anatomy.added:
        if added.special:
            letters.pop(added.id, None)
        else:
            letters[added.id] = anatomy.letters_of_added(added.content)
    if anatomy.unknown is not None:
        letters.pop(anatomy.unknown, None)
    return letters


def tokenizer_digest(tokenizer_json: str) -> str:
    """Hex digest of a tokenizer, by which files made for it (frequencies, affinity matrices) name it."""
    return blake2b(tokenizer_json.encode(), digest_size=16).hexdigest()
