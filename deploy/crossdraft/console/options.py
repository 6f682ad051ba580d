"""Functions as commands of typer's, with options that dataclasses may group."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def option(default: Any, help: str | None, *flags: str, **more: Any) -> Any:
    """A field, or a parameter, that is an option with this default; `flags` unless they follow from its name."""
    fresh = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**fresh, metadata={"option": typer.Option(*flags, help=help, **more)})


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command of `group`: its options are its parameters, and the fields of those of a dataclass.

    Such dataclasses may hold others. The function itself gets them made.
    """

    def added(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters

        @wraps(function)
        def run(**given: Any) -> None:
            function(**{name: _value(name, one.annotation, given) for name, one in own.items()})

        flat = [option for one in own.values() for option in _options(one.name, one.annotation, one.default)]
        vars(run)["__signature__"] = inspect.Signature(flat)
        run.__annotations__ = {one.name: one.annotation for one in flat}
        return group.command(name)(run)

    return added


def _options(name: str, type_: Any, default: Any) -> Iterator[inspect.Parameter]:
    """What typer is shown of a parameter or a field."""
    if is_dataclass(type_):
        types = get_type_hints(type_, include_extras=True)
        for one in fields(type_):
            yield from _options(one.name, types[one.name], one)
        return
    if isinstance(default, Field):
        if default.metadata:
            type_ = Annotated[type_, default.metadata["option"]]
        default = default.default if default.default_factory is MISSING else default.default_factory()
    default = inspect.Parameter.empty if default is MISSING else default
    yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type_)


def _value(name: str, type_: Any, given: Mapping[str, Any]) -> Any:
    if not is_dataclass(type_):
        return given[name]
    types = get_type_hints(type_, include_extras=True)
    values = {one.name: _value(one.name, types[one.name], given) for one in fields(type_)}
    return type_(**values)  # type: ignore[operator]  # is_dataclass is true of instances, too
