"""Where Prometheus finds the processes of a cluster: what its `http_sd_configs` reads."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI, Header, Response
from pydantic import BaseModel

from crossdraft.serving.cluster.directing import DirectoryGoneError, FarDirectory
from crossdraft.serving.cluster.directory import Entry
from crossdraft.serving.keys import KeyRefusedError, Keys

PATH = "/metrics/targets"


class Scraped(BaseModel):
    """One process, as Prometheus wants it."""

    targets: list[str]  # host:port
    labels: dict[str, str]


def scraped(entries: Sequence[Entry]) -> list[Scraped]:
    """Those that answer Prometheus, with what they are and where."""
    return [
        Scraped(targets=[entry.metrics], labels={"crossdraft_role": entry.role.value, "crossdraft_node": entry.node})
        for entry in entries
        if entry.metrics
    ]


def add_scraping(app: FastAPI, directory: FarDirectory, keys: Keys) -> None:
    """Adds the route. It needs a key where there are keys: it tells where services are."""

    @app.get(PATH, response_model=list[Scraped], include_in_schema=False)
    async def targets(response: Response, authorization: Annotated[str | None, Header()] = None) -> list[Scraped]:
        try:
            keys.holder(authorization)
            _, entries = await directory.entries()
        except KeyRefusedError:
            response.status_code = 401
            return []
        except DirectoryGoneError:
            response.status_code = 503
            return []
        return scraped(entries)
