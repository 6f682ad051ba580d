"""Chat templates: the Jinja source that comes with a tokenizer, rendered as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
# What a template's own expressions can raise besides Jinja's errors; memory and the stack are the caller's concern.
MISTAKES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplateError(ValueError):
    """A template that cannot be read, or that refuses a chat; the text says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """How a model wants a chat to be written."""

    source: str  # Jinja; not empty
    tokens: tuple[tuple[str, str], ...] = ()  # (bos_token, eos_token, …; content) that it may refer to

    def render(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] = NO_SETTINGS) -> str:
        """The chat as the model's text, up to where its answer begins; special tokens are in it by name.

        Raises ChatTemplateError: the template is damaged, or cannot write these messages.
        """
        try:
            usual = {"tools": None, "documents": None, "add_generation_prompt": True, **dict(self.tokens)}
            return compiled(self.source).render(usual | {**settings, "messages": [dict(one) for one in messages]})
        except MISTAKES as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error


@lru_cache(maxsize=32)
def compiled(source: str) -> Template:
    """In a sandbox: it comes with a model, from wherever that came. Raises TemplateSyntaxError: it is damaged."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # through the class a template could reach others
        "namespace": _GuardedNamespace,
    }
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model has said; it is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _GuardedNamespace(Namespace):
    """Keeps no attribute that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=…)` works
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace keeps no attribute that begins with an underscore, such as {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would misread; the arguments are those of transformers' one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
