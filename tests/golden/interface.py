"""What users write, as files: the help of each command, the OpenAPI document, and the schema of a cluster's file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from crossdraft.cli.app import app
from crossdraft.cluster.config import WHOLE
from crossdraft.serving.http import make_app
from tests.serving.fakes import FakeBackend

FOLDER = Path(__file__).parent / "interface"
LABORATORY = "bench"  # its commands are not of the product


def written() -> dict[str, str]:
    """The text of each file."""
    schema = make_app(FakeBackend()).openapi()
    return {
        "commands.txt": "\n".join(_help(typer.main.get_command(app), "crossdraft")),
        "http.json": _json({"paths": list(schema["paths"]), "bodies": schema["components"]["schemas"]}),
        "cluster.json": _json(WHOLE.json_schema()),
    }


def _help(command: Any, name: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    yield f"\n{command.get_usage(context)}\n{command.help}"
    for one in command.get_params(context):
        if (record := one.get_help_record(context)) is not None and record[0] != "--help":
            yield f"  {record[0]}\n    {record[1]}"
    for word, below in getattr(command, "commands", {}).items():
        if word != LABORATORY:
            yield from _help(below, f"{name} {word}")


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"
