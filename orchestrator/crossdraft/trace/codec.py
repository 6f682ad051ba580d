"""Plain values as msgpack bytes and back, without pickle: only known types come out.

A value of a known dataclass is an array that begins with a mark, whose code is the type's place in the writer's table
of names; its fields follow in the order of that table, which travels with the file. Numpy arrays are raw bytes of the
narrowest type that holds them exactly. Sequences come back as tuples, but for lists that are a dataclass's fields.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]  # there are no stubs
import numpy as np
from numpy.typing import NDArray

from crossdraft.session import events
from crossdraft.session.events import Command, Event, Finished
from crossdraft.session.resolution import Secrets
from crossdraft.speculation import choice
from crossdraft.speculation.choice import Estimates
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.types import messages, request, rows, trees
from crossdraft.types.messages import Description
from crossdraft.types.request import GenerationRequest
from crossdraft.types.statistics import Counts, Kind

ARRAY, ERROR, INTEGER, LIST = range(4)  # extension codes of what is no dataclass
FIRST_TYPE = 8  # of the codes of known types
MOST_TYPES = 128 - FIRST_TYPE  # msgpack has 128 codes
NUMBERS = "biuf"  # kinds of numpy arrays that are written: booleans, integers, floats
INTEGERS = (np.uint8, np.uint16, np.uint32, np.int32)


class PackingError(ValueError):
    """A value that cannot be written, or bytes that are no known value; the text says which and why."""


class RecordedError(Exception):
    """An error as it was recorded: its class by name, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True)
class _Mark:
    """What an array begins with that stands for a value."""

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
        self.table: bytes = msgpack.packb([(one.__name__, field_names(one)) for one in known])  # what a reader needs
        self._marks = {one: msgpack.ExtType(code, b"") for code, one in enumerate(known, FIRST_TYPE)}
        self._fields = {one: field_names(one) for one in known}

    def pack(self, value: object) -> bytes:
        """The value as bytes.

        Raises:
            PackingError: its type, or that of something in it, is not known.
        """
        try:
            packed: bytes = msgpack.packb(value, default=self._plain)
        except (ValueError, TypeError, OverflowError) as error:
            raise PackingError(f"a value cannot be recorded: {error}") from error
        return packed

    def _plain(self, value: Any) -> object:
        """What msgpack knows, in place of what it does not."""
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
    """The same numbers in the narrowest type that holds them exactly; with a NaN among them the array itself."""
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
    """The fields of a dataclass, in order; none of an enum."""
    return tuple(field.name for field in fields(known) if field.init) if is_dataclass(known) else ()


class Unpacker:
    """Reads what a Packer wrote.

    Args:
        types: the known ones.
        table: the writer's.

    Raises:
        PackingError: it is no table, or names a type, or a field of one, that is not known here.
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
            PackingError: the bytes are no value, or one of a type that is not known.
        """
        try:
            return msgpack.unpackb(
                packed, ext_hook=self._extension, list_hook=self._sequence, use_list=False, strict_map_key=False
            )
        except PackingError:
            raise
        # What a dataclass's own checks raise is among these.
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
    kinds = np.dtype(dtype), np.dtype(narrow)
    if not all(kind.kind in NUMBERS for kind in kinds):
        raise PackingError(f"it has an array of {dtype}")
    return np.frombuffer(raw, kinds[1]).reshape(shape).astype(kinds[0])


# A recorded session: a header, then one record a round.
#
# The file begins with MAGIC and the version of the format. Then come records: a length, the CRC-32 of the bytes, the
# bytes. The first is the table of types, the second the header, every other a round. What was written before a crash
# can be read, and damage is noticed.

MAGIC = b"crossdraft flight"
FORMAT = 1
VERSION = struct.Struct("<H")
FRAME = struct.Struct("<II")  # length and CRC-32 of a record


@dataclass(frozen=True, eq=False)
class Header:
    """What a session began with."""

    software: str  # version of crossdraft
    began: float  # seconds since 1970, UTC
    request: GenerationRequest
    target: Description
    drafter: Description | None  # None: plain decoding
    secrets: Secrets
    targets: int = 1  # addresses that there were
    before: Estimates | None = None  # what the controller had learnt
    follows: bool = False  # another output was getting to know the services


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the session."""

    now: float  # seconds of the monotonic clock, as the session was told
    event: Event | None  # None: it was started
    commands: tuple[Command, ...]
    seconds: float = 0.0  # that the call took
    row_misses: int = 0  # so far
    sent: int = 0  # bytes of messages to services so far
    received: int = 0  # bytes of their answers so far


Round = tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What a file holds."""

    header: Header
    rounds: tuple[Round, ...]
    fault: str = ""  # why the rest of the file could not be read

    @property
    def steps(self) -> Iterator[Step]:
        """All of them, in order."""
        for steps in self.rounds:
            yield from steps

    @property
    def finished(self) -> Finished | None:
        """The session's end, if it was recorded."""
        commands = (command for step in self.steps for command in step.commands)
        return next((command for command in commands if isinstance(command, Finished)), None)


class RecordingError(ValueError):
    """A file is no recording that can be read here; the text says why."""


def _values_of(module: ModuleType) -> list[type]:
    """The dataclasses and enums that a module defines."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [one for one in own if is_dataclass(one) or issubclass(one, Enum)]


KNOWN = (
    *(known for module in (messages, events, choice, rows, trees, request) for known in _values_of(module)),
    ChatTemplate,
    Counts,
    Kind,
    Secrets,
    Estimates,
    Header,
    Step,
)


class Writer:
    """Writes a recording to a file that is open for bytes; raises OSError and PackingError."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._packer = Packer(KNOWN)
        file.write(MAGIC + VERSION.pack(FORMAT))
        self._frame(self._packer.table)
        self._frame(zlib.compress(self._packer.pack(header)))  # two tokenizers, megabytes of text
        file.flush()

    def write(self, steps: Round) -> None:
        """One round."""
        self._frame(self._packer.pack(steps))
        self._file.flush()

    def _frame(self, record: bytes) -> None:
        self._file.write(FRAME.pack(len(record), zlib.crc32(record)) + record)


def read(path: Path) -> Recording:
    """A recording, or as much of it as is whole.

    Raises:
        OSError: the file cannot be read.
        RecordingError: it is no recording, or has no readable header.
    """
    data = path.read_bytes()
    begin = len(MAGIC) + VERSION.size
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise RecordingError(f"{path} is no recording of crossdraft")
    (version,) = VERSION.unpack_from(data, len(MAGIC))
    if version != FORMAT:
        raise RecordingError(f"{path} has format {version}, and this version of crossdraft reads format {FORMAT}")
    records = Frames(data, begin)
    try:
        unpacker = Unpacker(KNOWN, next(records, b""))
        header = unpacker.unpack(zlib.decompress(next(records, b"")))
    except (PackingError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {records.fault or error}") from error
    if not isinstance(header, Header):
        raise RecordingError(f"{path} cannot be read: it has no header")
    return _recording(header, records, unpacker)


def _recording(header: Header, records: "Frames", unpacker: Unpacker) -> Recording:
    rounds: list[Round] = []
    for record in records:
        try:
            steps = unpacker.unpack(record)
        except PackingError as error:
            return Recording(header, tuple(rounds), f"round {len(rounds) + 1}: {error}")
        if not (isinstance(steps, tuple) and all(isinstance(step, Step) for step in steps)):
            return Recording(header, tuple(rounds), f"round {len(rounds) + 1}: it is no round")
        rounds.append(steps)
    return Recording(header, tuple(rounds), records.fault)


class Frames:
    """The records of a file, from a place on; `fault` says why they ended before the file did."""

    def __init__(self, data: bytes, begin: int) -> None:
        self.fault = ""
        self._data = data
        self._place = begin

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        left = len(self._data) - self._place
        if not left or self.fault:
            raise StopIteration
        length, check = FRAME.unpack_from(self._data, self._place) if left >= FRAME.size else (0, 0)
        begin = self._place + FRAME.size
        record = self._data[begin : begin + length]
        if left < FRAME.size + length or left < FRAME.size:
            self.fault = "the file ends in the middle of a record"
        elif zlib.crc32(record) != check:
            self.fault = "a record is damaged"
        if self.fault:
            raise StopIteration
        self._place = begin + length
        return record
