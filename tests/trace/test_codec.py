"""Values come back as they were, and nothing but known values comes back."""

from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import msgpack  # type: ignore[import-untyped]  # there are no stubs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from crossdraft.session.events import Cancelled, Lost
from crossdraft.trace.codec import ARRAY, Codec, PackingError, RecordedError
from crossdraft.trace.recording import KNOWN
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.statistics import Counts, Kind


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, eq=False)
class Leaf:
    values: np.ndarray
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Tree:
    leaves: tuple[object, ...]
    names: list[str] = field(default_factory=list)


TYPES = (Colour, Leaf, Tree)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([*Colour])
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.builds(Tree, st.lists(inner, max_size=3).map(tuple), st.lists(st.text(), max_size=3))
        | st.dictionaries(st.sampled_from([*Colour]) | st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.bool_, np.uint8, np.int32, np.int64, np.uint64, np.float32, np.float64]),
    arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5),
)


def there_and_back(value: object, types: tuple[type, ...] = TYPES) -> object:
    codec = Codec(types)
    return codec.unpack(codec.pack(value))


@given(VALUES)
def test_values_come_back(value: object) -> None:
    # By text: NaN is not equal to itself, and types count.
    assert repr(there_and_back(value)) == repr(value)


@given(ARRAYS)
def test_arrays_come_back_with_type_shape_and_every_bit(array: np.ndarray) -> None:
    found = there_and_back(Leaf(array))
    assert isinstance(found, Leaf)
    assert found.values.dtype == array.dtype
    assert found.values.shape == array.shape
    assert np.array_equal(found.values, array, equal_nan=array.dtype.kind == "f")


def test_errors_come_back_by_name_and_text() -> None:
    found = there_and_back(Lost(3, OSError(2, "gone")), KNOWN)
    assert isinstance(found, Lost)
    assert isinstance(found.error, RecordedError)
    assert (found.error.name, str(found.error)) == ("FileNotFoundError", "[Errno 2] gone")
    again = there_and_back(found, KNOWN)
    assert isinstance(again, Lost)
    assert isinstance(again.error, RecordedError)
    assert again.error.name == "FileNotFoundError"


def test_numpy_scalars_become_plain_numbers() -> None:
    assert there_and_back((np.int64(3), np.float32(0.5), np.bool_(True))) == (3, 0.5, True)


class Stranger:
    """Of no known type."""


@pytest.mark.parametrize("value", [Stranger(), {1, 2}, np.array([Stranger()]), (1, Cancelled())])
def test_what_is_not_known_is_not_written(value: object) -> None:
    with pytest.raises(PackingError, match="cannot be recorded"):
        Codec(TYPES).pack(value)


def test_a_reader_must_know_the_types_and_their_fields() -> None:
    packed = Codec(TYPES).pack(Tree((1,)))
    with pytest.raises(PackingError, match="'Tree'"):
        Codec((Colour, Leaf)).unpack(packed)

    @dataclass(frozen=True)
    class Other:
        leaves: tuple[object, ...]

    Other.__name__ = "Tree"
    with pytest.raises(PackingError, match="Tree has a field 'names'"):
        Codec((Colour, Leaf, Other)).unpack(packed)
    assert Codec(TYPES).unpack(Codec((Other,)).pack(Other((1,)))) == Tree((1,))  # it may know more


@dataclass(frozen=True)
class Limited:
    value: int

    def __post_init__(self) -> None:
        if self.value > 9:
            raise ValueError("at most 9")


def test_what_a_dataclass_refuses_is_damage() -> None:
    @dataclass(frozen=True)
    class Free:
        value: int

    Free.__name__ = "Limited"
    with pytest.raises(PackingError, match="at most 9"):
        Codec((Limited,)).unpack(Codec((Free,)).pack(Free(10)))


@given(st.data())
def test_damaged_bytes_are_refused_or_another_value(data: st.DataObject) -> None:
    codec = Codec(KNOWN)
    packed = bytearray(codec.pack((SamplingOptions(), Counts(), np.arange(5), Kind.BONUS, 2**70)))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] = data.draw(st.integers(0, 255))
    with suppress(PackingError):  # and no other error
        codec.unpack(bytes(packed))


def test_arrays_of_other_kinds_are_refused() -> None:
    for dtype in ("|O", "<U4", "i4,f4"):
        packed = msgpack.packb(msgpack.ExtType(ARRAY, msgpack.packb((dtype, (1,), b"12345678"))))
        with pytest.raises(PackingError, match="it has an array of"):
            Codec(TYPES).unpack(packed)
