"""Options of all that serves: how its log looks, and where its metrics are read."""

from typing import Annotated

import typer

from crossdraft.serving.logs import LogFormat, LogLevel

__all__ = ["LogFormat", "LogLevel", "LogLevelOption", "LogLines", "MetricsPort"]

LogLines = Annotated[
    LogFormat, typer.Option("--log-format", help="Of the lines on standard error; json is one object a line.")
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="The least that is written.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Answer Prometheus on this port of --host, over plain HTTP; 0 is any free one."),
]
