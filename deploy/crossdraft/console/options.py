"""Functions as commands of typer's, with options that dataclasses may group."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

COMMAS = "comma-separated or repeated"  # in the help of every list whose values may be given so
LISTED = re.compile(r"([A-Z:]+),(\.\.\.|\1)")  # the metavar of a text with commas: it may be given in parts


class _Command(TyperCommand):
    """Values of options whose help says COMMAS are separated before their types are looked at."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for one in self.params:
            if COMMAS in (getattr(one, "help", None) or ""):
                vars(one)["process_value"] = partial(_separated, one.process_value)


def _separated(process: Callable[..., Any], context: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        value = [part for one in value for part in (one.split(",") if isinstance(one, str) else (one,))]
    return process(context, value)


def option(default: Any, help: str | None, *flags: str, **more: Any) -> Any:
    """A field, or a parameter, that is an option with this default; `flags` unless they follow from its name."""
    fresh = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**fresh, metadata={"option": typer.Option(*flags, help=help, **more)})


def command(
    group: typer.Typer, name: str | None = None, runs: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command of `group`: its options are its parameters, and the fields of those of a dataclass.

    Such dataclasses may hold others. The function itself gets them made. A tuple of any length is a repeatable option.

    Args:
        group: where it is added.
        name: of the command, unless it is the function's.
        runs: MODULE:FUNCTION of the same parameters, which is imported and called in place of the decorated one.
    """

    def added(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters

        @wraps(function)
        def run(**given: Any) -> None:
            module, _, called = runs.partition(":")
            work = getattr(import_module(module), called) if runs else function
            work(**{name: _value(name, _shown(one.annotation, one.default), given) for name, one in own.items()})

        flat = [option for one in own.values() for option in _options(one.name, one.annotation, one.default)]
        vars(run)["__signature__"] = inspect.Signature(flat)
        run.__annotations__ = {one.name: one.annotation for one in flat}
        return group.command(name, cls=_Command)(run)

    return added


def _options(name: str, type_: Any, default: Any) -> Iterator[inspect.Parameter]:
    """What typer is shown of a parameter or a field."""
    if isinstance(default, Field):
        type_ = _shown(type_, default)
        default = default.default if default.default_factory is MISSING else default.default_factory()
    if is_dataclass(type_):
        types = get_type_hints(type_, include_extras=True)
        for one in fields(type_):
            own = types[one.name]
            if isinstance(default, type_):  # type: ignore[arg-type]  # is_dataclass is true of instances, too
                yield from _options(one.name, _shown(own, one), getattr(default, one.name))
            else:
                yield from _options(one.name, own, one)
        return
    default = inspect.Parameter.empty if default is MISSING else default
    if _repeats(type_):
        bare, *more = get_args(type_)
        type_, default = Annotated[list[get_args(bare)[0]], *more], list(default)  # type: ignore[misc]  # of run time
    elif _in_parts(type_):
        type_, default = Annotated[list[str] | None, get_args(type_)[1]], [default] if default else None
    yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type_)


def _shown(type_: Any, of: Any) -> Any:
    """The type of a field, with what its option says."""
    return Annotated[type_, of.metadata["option"]] if isinstance(of, Field) and of.metadata else type_


def _value(name: str, type_: Any, given: Mapping[str, Any]) -> Any:
    if _in_parts(type_):
        return ",".join(given[name] or ()) or ("" if get_args(type_)[0] is str else None)
    if not is_dataclass(type_):
        return tuple(given[name]) if _repeats(type_) else given[name]
    types = get_type_hints(type_, include_extras=True)
    values = {one.name: _value(one.name, _shown(types[one.name], one), given) for one in fields(type_)}
    return type_(**values)  # type: ignore[operator]  # is_dataclass is true of instances, too


def _in_parts(type_: Any) -> bool:
    """Whether it is a text with commas."""
    bare, *more = get_args(type_) if get_origin(type_) is Annotated else (type_,)
    return bare in (str, str | None) and any(LISTED.fullmatch(getattr(one, "metavar", None) or "") for one in more)


def _repeats(type_: Any) -> bool:
    bare = get_args(type_)[0] if get_origin(type_) is Annotated else type_
    return get_origin(bare) is tuple and get_args(bare)[-1] is Ellipsis
