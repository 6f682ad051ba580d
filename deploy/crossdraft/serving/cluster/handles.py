"""Orchestrators behind a handle of Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from crossdraft.serving.cluster.hearing import Lost, Together
from crossdraft.serving.cluster.orchestrating import Orchestrator
from crossdraft.serving.orders import Order, OverloadedError, ServedModel

CROWDED_SECONDS = 1.0  # before a client may ask again where all replicas are taken


class ServeOrchestrators:
    """The replicas of one deployment; each call goes to the one with the fewest under way."""

    def __init__(self, handle: DeploymentHandle[Orchestrator]) -> None:
        self._handle = handle

    async def models(self) -> tuple[ServedModel, ...]:
        """As `Orchestrators.models`."""
        with _foreign_errors():
            models: tuple[ServedModel, ...] = await self._handle.models.remote()
        return models

    async def stream(self, order: Order) -> AsyncGenerator[Together, None]:
        """As `Orchestrators.stream`; closing it early cancels the replica's work."""
        with _foreign_errors():
            response: Any = self._handle.options(stream=True).stream.remote(order)
            try:
                async for together in response:
                    yield together
            finally:
                response.cancel()


@contextmanager
def _foreign_errors() -> Iterator[None]:
    """What Ray raises, as what it means."""
    try:
        yield
    except BackPressureError as error:
        raise OverloadedError("all orchestrators are taken", CROWDED_SECONDS) from error
    except (RayError, RayServeException) as error:
        raise Lost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Lost("it was stopped") from error
