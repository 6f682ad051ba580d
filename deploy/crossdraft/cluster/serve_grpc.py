"""Serve's calls by gRPC, with the keepalive of the services' links; and its choice among orchestrators.

Not Ray's streaming calls, which Serve makes by default: at the end of a stream the callee's event loop stands still
until the caller has acknowledged all of it, for over a minute where the caller's host is cut off.
"""

import random
import time
from functools import partial
from typing import Any, ClassVar

from ray._private import grpc_utils
from ray.serve._private import replica
from ray.serve._private.request_router import replica_wrapper
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from crossdraft.rpc.transport import CLIENT_OPTIONS, SERVER_OPTIONS, ChannelOptions

AVOID_SECONDS = 30.0  # by then Serve knows of a replica that is lost
UNLIMITED: ChannelOptions = (("grpc.max_receive_message_length", -1),)  # fronts limit what clients send
PROXY = {"RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.set_up_proxy"}


def keep_alive() -> None:
    """Gives the channels and servers that Serve makes in this process from now on the options of services."""
    for module, name, more in (
        (replica_wrapper, "init_grpc_channel", CLIENT_OPTIONS),
        (replica, "create_grpc_server_with_interceptors", SERVER_OPTIONS),
    ):
        vars(module)[name] = partial(_made, getattr(grpc_utils, name), dict(more + UNLIMITED))


def _made(make: Any, more: dict[str, int], *given: Any, options: Any = (), **named: Any) -> Any:
    return make(*given, options=tuple((dict(options) | more).items()), **named)


def set_up_proxy() -> list[object]:
    """Serve calls it in its proxies before they listen; middleware."""
    from crossdraft.serving.http.connections import limit_uvicorn

    keep_alive()
    return limit_uvicorn()


class Elsewhere(FIFOMixin, RequestRouter):
    """Of two replicas that are not avoided, or if there are none of any two, Serve takes the one with less to do."""

    avoided: ClassVar[dict[str, float]] = {}  # actor ids, and until when; seconds of the monotonic clock

    @classmethod
    def avoid(cls, actor: str) -> None:
        """Nothing of this process goes to the replica with this actor for a while, if it can go to others."""
        cls.avoided[actor] = time.monotonic() + AVOID_SECONDS

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As Serve asks for."""
        now = time.monotonic()
        others = [one for one in candidate_replicas if self.avoided.get(one.actor_id.hex(), 0.0) <= now]
        among = others or candidate_replicas
        return [random.sample(among, min(2, len(among)))]
