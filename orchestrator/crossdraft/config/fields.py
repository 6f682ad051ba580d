"""Fields that are options, and whether a value is in the range of one."""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import MISSING, Field, field, fields
from functools import cache
from math import inf, isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

PREFIX = "CROSSDRAFT_"  # of environment variables
COMMAS = "comma-separated or repeated"  # in the help of every list whose values may be given so
BY_DEFAULT = "by default the model's, or"
KINDS = ((bool, "True or False"), (int, "a whole number"), (float, "a number"), (str, "a text"), (Path, "a Path"))

Kind = TypeVar("Kind")


class LeftOut:
    """Marks a number that a request does not name: the model's own setting counts instead, if it has one.

    Otherwise it is that number: whoever knows no model can check and compare it, and a given one is equal to it. The
    mark stays in copies, pickles and protobuf messages, and is lost in arithmetic, JSON and msgpack: a request that is
    recorded is settled before (`SamplingDefaults.fill`).
    """


class LeftOutFloat(LeftOut, float):
    """Equal to the number that counts where the model has no setting."""


class LeftOutInt(LeftOut, int):
    """The same of a whole number."""


class OptionError(ValueError):
    """An option has a value that it cannot have; the text says which, and what it may be."""

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(f"{name} {fault}")
        self.name = name


def option(
    default: Any,
    help: str | None,
    *flags: str,
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    metavar: str | None = None,
    env: bool = False,
    hidden: bool = False,
) -> Any:
    """A field, or a parameter, that is an option.

    Args:
        default: MISSING: it must be given. A LeftOut: the model may have a setting of its own.
        help: what it is, with its unit.
        flags: of the command line, unless they follow from the name.
        min, above, max: its range, of a list that of each entry; None: no limit. A number is finite.
        metavar: in the command line's help; `HOST:PORT,...`, with such an end, may be given in parts.
        env: the variable PREFIX and its name is the command line's default.
        hidden: from the help.
    """
    fresh = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    # Scalars have these by the names that pydantic reads from fields of dataclasses.
    entries = "each_" if isinstance(default, list | tuple) else ""
    ranges = {f"{entries}{name}": value for name, value in (("ge", min), ("gt", above), ("le", max))}
    if help is not None and isinstance(default, LeftOut):
        help = f"{help}; {BY_DEFAULT} {default:g}."
    command_line = {"flags": flags, "metavar": metavar, "env": env, "hidden": hidden}
    ranges = {name: value for name, value in ranges.items() if value is not None}
    return field(**fresh, metadata={"description": help, **ranges, **command_line})


def fault_of(metadata: Mapping[str, Any], value: Any) -> str:
    """What is wrong with the value of an option, to be said after its name; empty if nothing is."""
    entries = value if isinstance(value, list | tuple) else (value,)
    return next(filter(None, (_fault(metadata, entry) for entry in entries)), "")


def _fault(metadata: Mapping[str, Any], value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    least, above, most = _bounds(metadata)
    within = (-inf if least is None else least) <= value <= (inf if most is None else most)
    if within and (above is None or value > above) and isfinite(value):
        return ""
    return f"must be {range_of(metadata) or 'a finite number'}, got {value}"


def range_of(metadata: Mapping[str, Any]) -> str:
    """The range of an option in words; empty if it has none."""
    least, above, most = _bounds(metadata)
    if least is not None and most is not None:
        return f"between {written(least)} and {written(most)}"
    if least == 0:
        return "0 or more"
    bounds = ("at least", least), ("above", above), ("at most", most)
    return " and ".join(f"{word} {written(bound)}" for word, bound in bounds if bound is not None)


def _bounds(metadata: Mapping[str, Any]) -> tuple[float | None, ...]:
    return tuple(metadata.get(name, metadata.get(f"each_{name}")) for name in ("ge", "gt", "le"))


def written(number: float) -> str:
    """A limit as people write it: those of 32 bits and more are powers of 2, or one below."""
    whole = int(number)
    for shift, end in ((whole.bit_length() - 1, ""), (whole.bit_length(), " - 1")):
        if shift >= 31 and whole == 2**shift - bool(end):
            return f"2**{shift}{end}"
    return f"{number}"


class Checked:
    """A dataclass whose options have values of their types, in their ranges, and go together, as each of its classes
    says with a method `_fault`; its text is empty if they do. Raises ValueError: they do not; the text says what to
    change."""

    def __post_init__(self) -> None:
        check(self)
        for kind in type(self).__mro__:
            if "_fault" in vars(kind) and (fault := vars(kind)["_fault"](self)):
                raise ValueError(fault)


def check(record: Any) -> None:
    """Raises OptionError unless all options of a dataclass have values of their types, in their ranges."""
    for one, kinds, what in typed(type(record)):  # type: ignore[arg-type]  # a type can be hashed
        value = getattr(record, one.name)
        if what and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise OptionError(one.name, f"must be {what}, got {value!r}")
        if fault := fault_of(one.metadata, value):
            raise OptionError(one.name, fault)


@cache
def typed(record: type) -> tuple[tuple["Field[Any]", tuple[type, ...], str], ...]:
    """The options of a dataclass, with the types that a value may have, and what an error calls them, if it may."""
    types, found = get_type_hints(record), []
    for stated in fields(record):
        if "description" in stated.metadata:
            union = get_origin(types[stated.name]) in (Union, UnionType)
            alternatives = get_args(types[stated.name]) if union else (types[stated.name],)
            what = next((text for kind, text in KINDS if kind in alternatives), "")
            found.append((stated, (*alternatives, *([int] if float in alternatives else [])), what))
    return tuple(found)


SCHEMES = "(?:unix|unix-abstract|vsock|dns|ipv[46]|xds)"  # of gRPC's other targets, with which no host is called


def fault_of_address(address: str) -> str:
    """What is wrong with it as host:port (gRPC's other targets are none), to be said after what it is of; or empty."""
    found = re.fullmatch(rf"(?!{SCHEMES}:)(?:[^\s:/=\[\]]+|\[[^\s/=\[\]]+\]):([0-9]{{1,5}})", address)
    scheme, separator, _ = address.partition("://")
    how = f"without {scheme}://" if separator else "such as 127.0.0.1:7001 or [::1]:7001"
    return "" if found and 0 < int(found[1]) < 65536 else f"must be HOST:PORT, {how}, got {address!r}"


def bare_key(given: str) -> str:
    """An API key without the blanks around it that a file or a variable may have. Raises ValueError: it is none."""
    key = given.strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise ValueError("an API key has visible ASCII characters only, and no spaces; check --api-key")
    return key


def unchecked(record: Kind, **changed: Any) -> Kind:
    """The same with other values, known to be right: to check all again takes as long as the record is large."""
    other = copy(record)
    for name, value in changed.items():
        object.__setattr__(other, name, value)
    return other


def part_of(kind: type[Kind], record: Any) -> Kind:
    """What a record has of the options of one of its bases, or of another dataclass with fields of the same names."""
    return kind(**{one.name: getattr(record, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def default_of(one: "Field[Any]") -> Any:
    """MISSING: it must be given."""
    return one.default if one.default_factory is MISSING else one.default_factory()
