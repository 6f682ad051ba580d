"""Affinities and their files: what comes back, and what is refused."""

import io
import json
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossdraft.text import affinity as text_affinity
from crossdraft.text.affinity import (
    Affinity,
    AffinityMismatch,
    FirstOrder,
    Kernel,
    Matrix,
    load_affinity,
    save_affinity,
)
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from tests.text.kinds import kind

TARGET, DRAFTER = kind("llama2"), kind("gpt2")  # llama2 has ids with the same letters
PAIR = Pair(TARGET.vocabulary(), DRAFTER.vocabulary(Side.DRAFTER))


def affinity(kernel: Kernel) -> Affinity:
    return Affinity.of(PAIR, kernel, TARGET.json, DRAFTER.json, "made up")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an affinity."""
    save_affinity(affinity(Matrix.identity(PAIR)), tmp_path / "affinity")
    return tmp_path / "affinity"


@pytest.mark.parametrize("kernel", [Matrix.identity(PAIR), FirstOrder.of(PAIR, np.arange(PAIR.target.size) + 1.0)])
def test_a_file_gives_back_what_was_saved(kernel: Matrix | FirstOrder, tmp_path: Path) -> None:
    saved = affinity(kernel)
    save_affinity(saved, tmp_path / "affinity")
    loaded = load_affinity(tmp_path / "affinity")
    assert (loaded.target, loaded.drafter) == (tokenizer_digest(TARGET.json), tokenizer_digest(DRAFTER.json))
    assert (loaded.letters, loaded.ranks, loaded.made) == (saved.letters, saved.ranks, "made up")
    ids = PAIR.shared_drafter_ids[::3]
    distribution = np.arange(len(ids)) + 1.0
    distribution /= distribution.sum()
    assert all(map(np.array_equal, loaded.redistribute(ids, distribution), saved.redistribute(ids, distribution)))
    assert loaded.drafter_ids.tolist() == PAIR.shared_drafter_ids.tolist()


def test_target_tokens_keep_their_letters_and_ranks(path: Path) -> None:
    loaded, vocabulary = load_affinity(path), TARGET.vocabulary()
    assert loaded.ranks  # else the next line says little
    assert all(loaded.rank(token) == vocabulary.rank(token) for token in range(vocabulary.size))
    assert all(loaded.letters_of(token) == letters for token, letters in enumerate(vocabulary.letters))


def test_another_drafter_is_refused() -> None:
    made = affinity(Matrix.identity(PAIR))
    made.check_drafter(DRAFTER.json, DRAFTER.size)
    with pytest.raises(AffinityMismatch, match=r"made for a drafter with another tokenizer.*crossdraft affinity"):
        made.check_drafter(TARGET.json, DRAFTER.size)
    with pytest.raises(AffinityMismatch, match=r"has draft token \d+, and the drafter has 9: .*crossdraft affinity"):
        made.check_drafter(DRAFTER.json, 9)


def test_a_kernel_for_a_larger_target_is_refused() -> None:
    ends = np.array([PAIR.target.size], dtype=np.int32)
    one = np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="target id"):
        affinity(Matrix(np.array([0]), np.array([0, 1]), ends, one))


def _rewritten(path: Path, name: str, value: object) -> None:
    with np.load(path) as arrays:
        found = {**arrays, name: np.asarray(value)}
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **found)


def said(**changes: object) -> np.ndarray:
    about = {"format": 1, "target": "t", "drafter": "d", "made": ""} | changes
    return np.frombuffer(json.dumps(about).encode(), np.uint8)


ENDS = np.cumsum([len(letters.encode()) for letters in PAIR.target.letters])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("weights", np.full(len(PAIR.shared_drafter_ids), 0.5, np.float32), "do not sum to one"),
        ("weights", np.ones(len(PAIR.shared_drafter_ids)), "weights is not a list of float32"),
        ("target_ids", np.full(len(PAIR.shared_drafter_ids), PAIR.target.size, np.int32), "not in the target's"),
        ("drafter_ids", PAIR.shared_drafter_ids[::-1], "ascending order"),
        ("starts", np.zeros((2, 2), np.int64), "starts is not a list"),
        ("letter_ends", np.array([3]), "damaged"),
        ("letter_ends", np.append(0, ENDS[1:]), "no letters"),
        ("letter_ends", np.concatenate([ENDS[1::-1], ENDS[2:]]), "no letters"),
        ("letter_ends", ENDS.astype(float), "letter_ends is not a list"),
        (
            "letters",
            np.frombuffer("\u0100".encode() + b"a" * (int(ENDS[-1]) - 2), np.uint8),
            "U.0100 is no letter",
        ),
        ("about", said(target=5), "which tokenizers"),
        ("about", said(target=None, drafter=[]), "which tokenizers"),
        ("about", said(drafter=""), "which tokenizers"),
        ("about", np.frombuffer(b"[" * 200_000, np.uint8), "damaged"),
        ("ranks", np.array([[0, np.inf]]), "pairs of int64"),
        ("ranks", np.array([[0, -1]]), "out of its range"),
        ("ranks", np.array([[PAIR.target.size, 1]]), "out of its range"),
        ("about", np.frombuffer(b'{"format": 0}', np.uint8), "format is 0"),
        ("about", np.frombuffer(b"[1]", np.uint8), "damaged"),
        ("about", np.frombuffer(b"{", np.uint8), "damaged"),
        ("ranks", np.zeros(3, np.int64), "damaged"),
    ],
)
def test_damaged_values_are_refused(path: Path, name: str, value: object, complaint: str) -> None:
    _rewritten(path, name, value)
    with pytest.raises(AffinityMismatch, match=complaint) as found:
        load_affinity(path)
    assert str(path) in str(found.value)
    assert "make it again with `crossdraft affinity`" in str(found.value)


def test_damaged_files_are_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    with ZipFile(path) as file:
        offset = file.getinfo("weights.npy").header_offset + 80
    damaged = (b"", b"no archive", content[: len(content) // 2], content[:offset] + b"\xff" * 8 + content[offset + 8 :])
    for number, raw in enumerate(damaged):
        other = tmp_path / str(number)
        other.write_bytes(raw)
        with pytest.raises(AffinityMismatch, match="damaged or not an affinity file"):
            load_affinity(other)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(changes=st.dictionaries(st.floats(0, 1, exclude_max=True), st.integers(0, 255), min_size=1, max_size=4))
def test_bytes_that_changed_are_one_error_or_none(path: Path, changes: dict[float, int]) -> None:
    content = bytearray(path.read_bytes())
    for place, byte in changes.items():
        content[int(place * len(content))] = byte
    other = path.with_name("other")
    other.write_bytes(content)
    with suppress(AffinityMismatch):
        load_affinity(other)


def _with_member(path: Path, name: str, content: bytes) -> None:
    with np.load(path) as arrays:
        found = {kept: array for kept, array in arrays.items() if f"{kept}.npy" != name.removesuffix(".npy") + ".npy"}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **found)
    with ZipFile(path, "a") as archive:
        archive.writestr(name, content)


def test_arrays_are_no_larger_than_their_content(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**13,)})
    _with_member(path, "letters.npy", header.getvalue())
    with pytest.raises(AffinityMismatch, match="damaged"):
        load_affinity(path)


def test_members_that_are_no_arrays_are_refused(path: Path) -> None:
    _with_member(path, "about", b'{"format": 1}')
    with pytest.raises(AffinityMismatch, match="damaged"):
        load_affinity(path)


@pytest.mark.parametrize("limit", ["LARGEST_FILE", "LARGEST_CONTENT"])
def test_files_that_are_too_large_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(text_affinity, limit, 1000)
    with pytest.raises(AffinityMismatch, match="is too large"):
        load_affinity(path)


def test_encrypted_and_strangely_packed_members_are_refused(path: Path) -> None:
    content = path.read_bytes()
    central = content.index(b"PK\x01\x02")
    for place, byte in ((central + 8, 1), (central + 10, 99), (central + 10, 12), (central + 10, 14)):
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        with pytest.raises(AffinityMismatch, match="damaged"):
            load_affinity(path)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", one=np.ones(3))
    np.save(tmp_path / "other.npy", np.ones(3))
    for name in ("other.npz", "other.npy"):
        with pytest.raises(AffinityMismatch, match="not an affinity file"):
            load_affinity(tmp_path / name)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_affinity(tmp_path / "none")
