"""Plain values as msgpack bytes and back, without pickle: only known types come out.

A value of a known dataclass is an array that begins with a mark, an extension code that is the type's index in the
writer's table of types; its fields follow in the order of that table, which is stored in the file. Numpy arrays are raw
bytes of the narrowest type that holds them exactly. Sequences are read as tuples, but for lists that are fields of a
dataclass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack  # type: ignore[import-untyped]  # there are no stubs
import numpy as np
from numpy.typing import NDArray

ARRAY, ERROR, INTEGER, LIST = range(4)  # extension codes of what is no dataclass
FIRST_TYPE = 8  # of the codes of known types
MOST_TYPES = 128 - FIRST_TYPE  # msgpack has 128 codes
NUMBERS = "biuf"  # kinds of numpy arrays that are written: booleans, integers, floats
INTEGERS = (np.uint8, np.uint16, np.uint32, np.int32)


class PackingError(ValueError):
    """A value cannot be written, or bytes are no value of a known type; the message says why."""


class RecordedError(Exception):
    """A recorded exception: the name of its class, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True)
class _Mark:
    """The first element of an array that stands for a value of a type."""

    code: int


class Packer:
    """Writes values of known types.

    Raises:
        ValueError: there are more types than codes.
    """

    def __init__(self, types: Iterable[type]) -> None:
        known = tuple(types)
        if len(known) > MOST_TYPES:
            raise ValueError(f"at most {MOST_TYPES} types can be known, got {len(known)}")
        self.table: bytes = msgpack.packb([(one.__name__, field_names(one)) for one in known])  # for the reader
        self._marks = {one: msgpack.ExtType(code, b"") for code, one in enumerate(known, FIRST_TYPE)}
        self._fields = {one: field_names(one) for one in known}

    def pack(self, value: object) -> bytes:
        """The value as bytes.

        Raises:
            PackingError: its type, or the type of something in it, is unknown.
        """
        try:
            packed: bytes = msgpack.packb(value, default=self._plain)
        except (ValueError, TypeError, OverflowError) as error:
            raise PackingError(f"a value cannot be recorded: {error}") from error
        return packed

    def _plain(self, value: Any) -> object:
        """A value that msgpack knows in place of one that it does not."""
        kind = type(value)
        mark = self._marks.get(kind)
        if mark is not None:
            if isinstance(value, Enum):
                return msgpack.ExtType(mark.code, value.name.encode())
            return [mark, *(_field(getattr(value, name)) for name in self._fields[kind])]
        match value:
            case np.ndarray():
                return _array(value)
            case np.generic():
                return value.item()
            case RecordedError():
                return [MARKS[ERROR], value.name, str(value)]
            case BaseException():
                return [MARKS[ERROR], kind.__name__, str(value)]
            case int():  # beyond 64 bits
                return msgpack.ExtType(INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        raise PackingError(f"a value of type {kind.__name__} cannot be recorded")


MARKS = [msgpack.ExtType(code, b"") for code in range(FIRST_TYPE)]


def _field(value: object) -> object:
    return [MARKS[LIST], *value] if isinstance(value, list) else value


def _array(array: NDArray[Any]) -> list[object]:
    if array.dtype.kind not in NUMBERS:
        raise PackingError(f"an array of {array.dtype} cannot be recorded")
    narrow = narrowed(array)
    return [MARKS[ARRAY], array.dtype.str, narrow.dtype.str, array.shape, narrow.tobytes()]


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the narrowest type that holds them exactly; the array itself if it has a NaN."""
    if not array.size:
        return array
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        for kind in INTEGERS:
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                return array.astype(kind)
    elif array.dtype == np.float64:
        with np.errstate(over="ignore"):
            single = array.astype(np.float32)
        if bool((single == array).all()):
            return single
    return array


def field_names(known: type) -> tuple[str, ...]:
    """The names of the init fields of a dataclass, in order; empty for an enum."""
    return tuple(field.name for field in fields(known) if field.init) if is_dataclass(known) else ()


class Unpacker:
    """Reads what a Packer wrote.

    Raises:
        PackingError: it is no table, or it names a type or field that is unknown here.
    """

    def __init__(self, types: Iterable[type], table: bytes) -> None:
        named = {known.__name__: known for known in types}
        self._types: list[tuple[type, tuple[str, ...]]] = []
        for name, written in _table(table):
            if name not in named:
                raise PackingError(f"it has values of a type {name!r} that is not known here")
            unknown = sorted(set(written) - set(field_names(named[name])))
            if unknown:
                raise PackingError(f"its {name} has a field {unknown[0]!r} that is not known here")
            self._types.append((named[name], written))

    def unpack(self, packed: bytes) -> Any:
        """The value.

        Raises:
            PackingError: the bytes are no value of a known type.
        """
        try:
            return msgpack.unpackb(
                packed, ext_hook=self._extension, list_hook=self._sequence, use_list=False, strict_map_key=False
            )
        except PackingError:
            raise
        # Includes what the checks of a dataclass raise.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgpack.UnpackException) as error:
            raise PackingError(f"the bytes are damaged: {error or type(error).__name__}") from error

    def _extension(self, code: int, packed: bytes) -> object:
        if code == INTEGER:
            return int.from_bytes(packed, "little", signed=True)
        return self._type(code)[0][packed.decode()] if packed else _Mark(code)  # type: ignore[index]

    def _sequence(self, values: Sequence[Any]) -> object:
        if not values or not isinstance(values[0], _Mark):
            return values
        code, rest = values[0].code, values[1:]
        if code == ARRAY:
            return _array_of(*rest)
        if code == ERROR:
            return RecordedError(*rest)
        if code == LIST:
            return list(rest)
        known, written = self._type(code)
        return known(**dict(zip(written, rest, strict=True)))

    def _type(self, code: int) -> tuple[type, tuple[str, ...]]:
        if not FIRST_TYPE <= code < FIRST_TYPE + len(self._types):
            raise PackingError(f"it has a value of an unknown kind ({code})")
        return self._types[code - FIRST_TYPE]


def _table(packed: bytes) -> list[tuple[str, tuple[str, ...]]]:
    try:
        return [(str(name), tuple(map(str, written))) for name, written in msgpack.unpackb(packed, use_list=False)]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise PackingError(f"its table of types is damaged: {error}") from error


def _array_of(dtype: str, narrow: str, shape: tuple[int, ...], raw: bytes) -> NDArray[Any]:
    for name in (dtype, narrow):  # numpy would read more than a name of a type, such as Python tuples
        if name[1:2] not in NUMBERS or not name[2:].isdecimal():
            raise PackingError(f"it has an array of {name}")
    return np.frombuffer(raw, np.dtype(narrow)).reshape(shape).astype(np.dtype(dtype))
