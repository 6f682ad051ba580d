"""A client's channel to one service: whether it is connected, and another one once its certificate was replaced."""

from collections.abc import Mapping
from weakref import WeakSet

import grpc

from crossdraft.rpc.security import ClientCredentials, Shown
from crossdraft.rpc.transport import MessageLimit, client_options

REACHABLE: Mapping[grpc.ChannelConnectivity, bool] = {
    grpc.ChannelConnectivity.READY: True,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE: False,
    grpc.ChannelConnectivity.SHUTDOWN: False,
}


class ServiceChannel:
    """The channel to an address. Must be made in a running event loop, and closed.

    Args:
        address: host:port.
        limit: of messages.
        tls: what is shown and trusted: as it is now, or as files have it whenever a session begins; None: plaintext.
    """

    def __init__(self, address: str, limit: MessageLimit, tls: ClientCredentials | Shown | None) -> None:
        self._address = address
        self._options = client_options(tls is not None) + limit.options()
        self._tls = tls
        self._credentials = tls.now() if isinstance(tls, Shown) else tls
        self._channel = self._made()
        self._all = WeakSet((self._channel,))  # a replaced one closes itself with the last of its sessions

    def current(self) -> grpc.aio.Channel:
        """The channel for what begins now. What has begun goes on over its own."""
        if isinstance(self._tls, Shown) and (credentials := self._tls.now()) is not self._credentials:
            self._credentials = credentials
            self._channel = self._made()
            self._all.add(self._channel)
        return self._channel

    def reachable(self) -> bool | None:
        """Whether the service can be reached now; None: that is being found out. A lost connection is made again.

        The channel knows by pings: a service that is dead, frozen or cut off is not reachable within seconds.
        """
        return REACHABLE.get(self.current().get_state(try_to_connect=True))

    async def close(self) -> None:
        """Closes it, and with it all its sessions."""
        for channel in list(self._all):
            await channel.close(None)

    def _made(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)
