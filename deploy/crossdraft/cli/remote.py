"""`crossdraft generate --server`: one continuation that a server makes, shown as it comes."""

from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.cli.failures import Misused
from crossdraft.cli.generate import NO_DRAFTER, check_address
from crossdraft.cli.running import checked_options, run_to_end
from crossdraft.cli.show import JsonScreen, Screen, TextScreen
from crossdraft.pipeline import GenerationRequest
from crossdraft.rpc.errors import NameUnknown
from crossdraft.rpc.security import trusting_credentials
from crossdraft.serving.client import Client


@dataclass(frozen=True)
class Asked:
    """The server, as it was typed."""

    server: str  # host:port
    model: str  # empty: its only one
    drafter: str | None  # name of one of its drafters, or "none"; None: the default one
    key: str = field(repr=False)  # empty: none
    ca: Path | None = None  # of the server's certificate; None: nothing is encrypted

    @property
    def drafter_name(self) -> str | None:
        """As orders have it."""
        return "" if self.drafter == NO_DRAFTER else self.drafter


def generate(request: GenerationRequest, asked: Asked, as_json: bool) -> None:
    """Has it generated, and shows it.

    Args:
        request: what to generate.
        asked: where.
        as_json: whether to write JSON.

    Raises:
        Misused: the server cannot serve the request, or knows no such model or drafter.
        CommandFailed: the server cannot be reached, refuses, or fails.
    """
    check_address("--server", asked.server)
    screen = JsonScreen() if as_json else TextScreen(audit=request.audit)
    run_to_end(_generate(request, asked, screen))


async def _generate(request: GenerationRequest, asked: Asked, screen: Screen) -> None:
    with checked_options():
        tls = None if asked.ca is None else trusting_credentials(asked.ca)
    try:
        async with (
            Client(asked.server, asked.key, tls) as client,
            client.run(request, asked.model, asked.drafter_name) as generation,
        ):
            screen.begin(str(request.prompt))
            async for token in generation:
                screen.token(token)
            screen.end(generation)
    except NameUnknown as error:
        raise Misused(str(error)) from error
