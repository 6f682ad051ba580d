"""MkDocs hooks: pages from Markdown files outside docs/, and the reference of the command line made from its code."""

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from crossdraft.cli.app import app
from crossdraft.config.fields import PREFIX, default_of, range_of

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "BENCHMARKS.md": "benchmarks.md"}
SOURCES = {page: source for source, page in ROOT_PAGES.items()}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
OPTIONS = {  # modules of `config`, and what their options are of
    "engine": "Models",
    "service": "Services",
    "api": "HTTP and gRPC API",
    "request": "Requests",
    "cluster": "A cluster",
}
ABOUT_OPTIONS = (
    "Generated from the code, where each is stated once. On the command line `max_model_len` is `--max-model-len`; "
    "in the file of a [cluster](../cluster.md), in the body of an [HTTP](../http-api.md) request, in gRPC and in "
    "[Python](../python.md) it has the name below. An empty default: it is left out, or what the text says."
)
LABORATORY = ("bench", "loadtest")  # commands that have a page of their own


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")))
    commands = list(_commands(typer.main.get_command(app), "crossdraft"))
    measuring = [(name, command) for name, command in commands if name.split()[1] in LABORATORY]
    others = [(name, command) for name, command in commands if name.split()[1] not in LABORATORY]
    files.append(File.generated(config, "reference/configuration.md", content=_configuration()))
    files.append(File.generated(config, "reference/cli.md", content=_reference("Command line", others)))
    files.append(File.generated(config, "reference/bench.md", content=_reference("The laboratory", measuring)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # it has its own table of pages
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def on_the_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        target = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is not None:
            url = posixpath.relpath(target, posixpath.dirname(here) or ".")
            return f"{link['image']}[{link['text']}]({url}{link['anchor'] or ''})"
        # Another file of the repository is no page: its name stays. MkDocs complains about one that is not there.
        return link["text"] if (REPOSITORY / path).exists() else link[0]

    return LINK.sub(on_the_site, markdown)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands below this one, with their full names, in the order of `--help`."""
    for word, below in command.commands.items():
        yield f"{name} {word}", below
        if hasattr(below, "commands"):
            yield from _commands(below, f"{name} {word}")


def _reference(title: str, commands: Iterable[tuple[str, Any]]) -> str:
    """A page: what `--help` says of each command."""
    parts = [f"# {title}", "Generated from the code: this is what `--help` says."]
    for name, command in commands:
        context = typer.Context(command, info_name=name)
        parts += [f"## {name}", _plain(command.help or ""), f"```sh\n{command.get_usage(context)}\n```"]
        records = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
        rows = [f"| {_code(names)} | {_cell(text)} |" for names, text in records if names != "--help"]
        if rows:
            parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _configuration() -> str:
    """A page: the options of each dataclass of `config`, by the names that they have everywhere."""
    parts = ["# Options, files and fields", ABOUT_OPTIONS]
    for name, title in OPTIONS.items():
        parts.append(f"## {title}")
        module = import_module(f"crossdraft.config.{name}")
        for kind in vars(module).values():
            own = vars(kind).get("__annotations__", {}) if getattr(kind, "__module__", "") == module.__name__ else {}
            stated = [one for one in fields(kind) if one.name in own] if is_dataclass(kind) else []
            shown = [one for one in stated if one.metadata.get("description")]
            rows = [f"| `{one.name}` | {_cell(_default(one))} | {_cell(_meaning(one))} |" for one in shown]
            if rows:
                parts += [f"### {kind.__name__}", _plain(" ".join((kind.__doc__ or "").split()))]
                parts.append("\n".join(["| name | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _default(one: Any) -> str:
    default = default_of(one)
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default))
    return "" if default is None or default is MISSING else str(default)


def _meaning(one: Any) -> str:
    variable = f" In the environment: `{PREFIX}{one.name.upper()}`." if one.metadata["env"] else ""
    limits = range_of(one.metadata)
    text: str = one.metadata["description"]
    return text + (limits and f" {limits[0].upper()}{limits[1:]}.") + variable


def _plain(text: str) -> str:
    """Text of the help as Markdown: only what is between backquotes keeps its meaning."""
    pieces = text.split("`")
    return "`".join(
        re.sub(r"([\\*_<>\[\]#])", r"\\\1", one) if place % 2 == 0 else one for place, one in enumerate(pieces)
    )


def _code(names: str) -> str:
    return "`" + names.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")
