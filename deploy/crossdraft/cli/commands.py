"""Functions as commands of typer's: their options are parameters, and the fields of dataclasses of `config`."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from crossdraft.cli.running import UsageError, checked_options, flag_of
from crossdraft.config.fields import COMMAS, KINDS, PREFIX, LeftOut, default_of, fault_of, range_of
from crossdraft.config.request import ALIASES


class _Command(TyperCommand):
    """What typer makes of a command line, with our texts for values that cannot be.

    Values of options whose help says COMMAS are separated before their types are looked at.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for parameter in self.params:
            vars(parameter)["process_value"] = partial(_processed, parameter, parameter.process_value)


def _processed(option: Any, process: Callable[..., Any], context: Any, value: Any) -> Any:
    """The value of an option; raises UsageError if its type has no such value."""
    if COMMAS in (getattr(option, "help", None) or "") and isinstance(value, list | tuple):
        value = [part for one in value for part in _parts(one)]
    try:
        return process(context, value)
    except typer.BadParameter as error:
        found: list[Any] = getattr(error.__cause__, "errors", list)()
        if not found or not (what := _wanted(option.type_descriptor.annotation, found[0].get("ctx", {}))):
            raise
        raise UsageError(f"{option.opts[0]} must be {what}, got {found[0]['input']}") from error


def _wanted(kind: Any, limits: Mapping[str, Any]) -> str:
    """What a value of this type, or of a list of them, may be; empty if that has no words."""
    if get_origin(kind) is list:
        return _wanted(get_args(kind)[0], limits)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = tuple(one.value for one in kind)
    if choices:
        return " or ".join((", ".join(choices[:-1]), choices[-1]) if choices[1:] else choices)
    return range_of(limits) or next((words for known, words in KINDS if known is kind), "")


def _parts(value: Any) -> Any:
    """Values with commas, or a JSON list, as vLLM has it."""
    if not isinstance(value, str):
        return (value,)
    try:
        listed = value.startswith("[") and not value[-1].isdigit()  # as [::1]:7001 ends
        return json.loads(value) if listed else map(str.strip, value.split(","))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{value} is neither a JSON list nor values with commas: {error}") from error


def command(
    group: typer.Typer, name: str | None = None, runs: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command of `group`: its options are its parameters, and the fields of those of a dataclass.

    Such dataclasses may hold others. The function itself gets them made, with values in their ranges. A tuple of any
    length is a repeatable option. What `runs`, a MODULE:FUNCTION, is imported and called in place of the decorated one.
    """

    def added(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters
        options = [found for one in own.values() for found in _options(one.name, one.annotation, one.default)]

        @wraps(function)
        def run(**given: Any) -> None:
            values = {option.parameter.name: option.value(given[option.parameter.name]) for option in options}
            module, _, called = runs.partition(":")
            work = getattr(import_module(module), called) if runs else function
            with checked_options():
                made = {name: _made(name, one.annotation, values) for name, one in own.items()}
            work(**made)

        vars(run)["__signature__"] = inspect.Signature([one.parameter for one in options])
        run.__annotations__ = {option.parameter.name: option.parameter.annotation for option in options}
        return group.command(name, cls=_Command)(run)

    return added


@dataclass(frozen=True)
class _Option:
    """A parameter as typer is shown it; for a field, or a parameter, of another type."""

    parameter: inspect.Parameter
    repeats: bool  # it is a tuple of any length, and typer is shown a list
    stated: "Field[Any] | None"  # as an option

    def value(self, given: Any) -> Any:
        """Of the field; raises UsageError if it is out of its range."""
        if self.stated is not None and (fault := fault_of(self.stated.metadata, given)):
            flag, *_ = self.stated.metadata["flags"] or (flag_of(self.parameter.name),)
            raise UsageError(f"{flag} {fault}")
        if given is None and self.stated is not None and isinstance(self.stated.default, LeftOut):
            return self.stated.default
        return tuple(given) if self.repeats else given


def _options(name: str, type_: Any, default: Any, stated: "Field[Any] | None" = None) -> Iterator[_Option]:
    """Those of a parameter or a field: of a dataclass all of its fields."""
    if isinstance(default, Field):
        default, stated = default_of(default), default
    if not is_dataclass(type_):
        yield _option(name, type_, default, stated if stated is not None and "flags" in stated.metadata else None)
        return
    types = get_type_hints(type_, include_extras=True)
    for one in fields(type_):
        given = isinstance(default, type_)  # type: ignore[arg-type]  # is_dataclass is true of instances, too
        yield from _options(one.name, types[one.name], getattr(default, one.name) if given else one, one)


def _option(name: str, type_: Any, default: Any, stated: "Field[Any] | None") -> _Option:
    shown, default = type_, inspect.Parameter.empty if default is MISSING else default
    if isinstance(default, LeftOut):
        shown, default = shown | None, None
    if repeats := get_origin(type_) is tuple:
        shown, default = list[get_args(type_)[0]], list(default)  # type: ignore[misc]  # of run time
    if stated is not None:
        said = stated.metadata
        shorts = [f"-{'-' * (len(one) > 1)}{one}" for one, of in ALIASES.items() if of == name]
        flags = said["flags"] or ((flag_of(name), *shorts) if shorts or (type_ is bool and not default) else ())
        variable = f"{PREFIX}{name.upper()}" if said["env"] else None
        words = {"metavar": said["metavar"], "hidden": said["hidden"], "envvar": variable}
        limits = range_of(said)
        help = said["description"] and said["description"] + (limits and f" {limits[0].upper()}{limits[1:]}.")
        shown = Annotated[shown, typer.Option(*flags, help=help, show_envvar=bool(variable), **words)]
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)
    return _Option(parameter, repeats, stated)


def _made(name: str, type_: Any, values: Mapping[str, Any]) -> Any:
    if not is_dataclass(type_):
        return values[name]
    types = get_type_hints(type_)
    made = {one.name: _made(one.name, types[one.name], values) for one in fields(type_)}
    return type_(**made)  # type: ignore[operator]  # is_dataclass is true of instances, too
