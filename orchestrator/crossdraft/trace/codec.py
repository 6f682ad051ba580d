"""Plain values as msgpack bytes and back, without pickle: only known types come out.

What msgpack does not know is an extension, whose bytes are msgpack again. A value of a known dataclass has its type's
name and its fields by their names, so that a reader may know more fields, which have defaults then. Sequences are read
as tuples, but for lists that are fields of a dataclass.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack  # type: ignore[import-untyped]  # there are no stubs
import numpy as np
from numpy.typing import NDArray

ARRAY, ERROR, INTEGER, LIST, MEMBER, RECORD = range(6)  # extension codes
NUMBERS = "biuf"  # kinds of numpy arrays that are written: booleans, integers, floats


class PackingError(ValueError):
    """A value cannot be written, or bytes are no value of a known type; the message says why."""


class RecordedError(Exception):
    """A recorded exception: the name of its class, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Codec:
    """Writes and reads values of these dataclasses and enums, of which no two have the same name."""

    def __init__(self, types: Iterable[type]) -> None:
        self._types = {one.__name__: one for one in types}

    def pack(self, value: object) -> bytes:
        """The value as bytes.

        Raises:
            PackingError: its type, or the type of something in it, is unknown.
        """
        try:
            packed: bytes = msgpack.packb(value, default=self._extension)
        except (ValueError, TypeError, OverflowError) as error:
            raise PackingError(f"a value cannot be recorded: {error}") from error
        return packed

    def _extension(self, value: Any) -> object:
        """A value that msgpack knows in place of one that it does not."""
        kind = type(value)
        if self._types.get(kind.__name__) is kind:
            if isinstance(value, Enum):
                return self._of(MEMBER, kind.__name__, value.name)
            given = {name: getattr(value, name) for name in field_names(kind)}
            lists = {name: self._of(LIST, *one) for name, one in given.items() if isinstance(one, list)}
            return self._of(RECORD, kind.__name__, given | lists)
        match value:
            case np.ndarray() if value.dtype.kind in NUMBERS:
                return self._of(ARRAY, value.dtype.str, value.shape, value.tobytes())
            case np.generic():
                return value.item()
            case RecordedError():
                return self._of(ERROR, value.name, str(value))
            case BaseException():
                return self._of(ERROR, kind.__name__, str(value))
            case int():  # beyond 64 bits
                return msgpack.ExtType(INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        raise PackingError(f"a value of type {kind.__name__} cannot be recorded")

    def _of(self, code: int, *parts: object) -> object:
        return msgpack.ExtType(code, self.pack(parts))

    def unpack(self, packed: bytes) -> Any:
        """The value.

        Raises:
            PackingError: the bytes are no value of a known type.
        """
        try:
            return msgpack.unpackb(packed, ext_hook=self._value, use_list=False, strict_map_key=False)
        except PackingError:
            raise
        # Includes what the checks of a dataclass raise.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgpack.UnpackException) as error:
            raise PackingError(f"the bytes are damaged: {error or type(error).__name__}") from error

    def _value(self, code: int, packed: bytes) -> object:
        if code == INTEGER:
            return int.from_bytes(packed, "little", signed=True)
        parts = self.unpack(packed)
        if code == ARRAY:
            return _array_of(*parts)
        if code == ERROR:
            return RecordedError(*parts)
        if code == LIST:
            return list(parts)
        name, given = parts
        if name not in self._types:
            raise PackingError(f"it has values of a type {name!r} that is not known here")
        known: Any = self._types[name]
        if code == MEMBER:
            return known[given]
        if unknown := sorted(given.keys() - set(field_names(known))):
            raise PackingError(f"its {name} has a field {unknown[0]!r} that is not known here")
        return known(**given)


def field_names(known: type) -> tuple[str, ...]:
    """The names of the init fields of a dataclass, in order; empty for an enum."""
    return tuple(field.name for field in fields(known) if field.init) if is_dataclass(known) else ()


def _array_of(dtype: str, shape: tuple[int, ...], raw: bytes) -> NDArray[Any]:
    # numpy would read more than a name of a type, such as Python tuples
    if dtype[1:2] not in NUMBERS or not dtype[2:].isdecimal():
        raise PackingError(f"it has an array of {dtype}")
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()
