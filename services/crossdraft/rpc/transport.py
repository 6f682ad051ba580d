"""Settings of gRPC that client and server must agree on."""

from dataclasses import dataclass
from functools import cached_property

import grpc

MIB = 1 << 20
LEAST_FRAME = 8 * MIB  # a prompt of a million tokens as letters; a row of a whole vocabulary has 4
ChannelOptions = tuple[tuple[str, int], ...]


def channel_to(address: str, tls: grpc.ChannelCredentials | None, options: ChannelOptions) -> grpc.aio.Channel:
    """To host:port; without credentials in plaintext."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls, options=options)


@dataclass(frozen=True)
class MessageLimit:
    """The largest message; frames of links have a limit of their own below it. Raises ValueError: out of its range."""

    mib: int = 32  # MiB, which gRPC can count up to 1024; a tokenizer.json has up to 20, a pass's reply 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.mib <= 1024:
            raise ValueError(f"a message limit must be between 1 and 1024 MiB, got {self.mib}")

    def __str__(self) -> str:
        return f"message limit of {self.mib} MiB"

    @cached_property
    def bytes(self) -> int:
        return self.mib * MIB

    @cached_property
    def frame_bytes(self) -> int:
        """Of a link's frame. Protobuf reads it in one go, up to 30 ns a byte, in which the event loop stands still."""
        return min(self.bytes, max(LEAST_FRAME, self.bytes // 4))

    def options(self) -> ChannelOptions:
        return (("grpc.max_send_message_length", self.bytes), ("grpc.max_receive_message_length", self.bytes))


# A cut link is noticed only by unanswered pings: without them a stream read hangs for over 45 s. gRPC sends at most one
# a second, which costs nothing beside the passes. Where neither pings nor requests are acknowledged, the link is cut:
# the kernel gives it up 0.4 to 0.5 s after this timeout, so 0.7 to 1.9 s after the cut. Where they are acknowledged but
# not answered, a process is frozen, its host's cores are all busy, or the cut came just then; it gets more time.
# A cluster promises that a lost host costs a stream at most 5 s. These constants make 3.75 of them: 1 until a ping is
# sent, 2 without its answer, 0.25 before another orchestrator is asked (`cluster.failover.PAUSE`), and 0.5 if that one
# is on the lost host, too, for connecting. The rest is for computing the text again.
CLIENT_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 400),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A service that was restarted, or whose link is back, is found again within half a second; gRPC's own pauses grow
    # to minutes. The second is also how long connecting may take: two round trips.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Services are on a private network; a web proxy must not be used.
    ("grpc.enable_http_proxy", 0),
    # Two clients of one address must not share a connection whose limits are those of the first.
    ("grpc.use_local_subchannel_pool", 1),
)
# With TLS a third round trip comes before the first message.
TLS_CONNECT_MS = 1000


def client_options(tls: bool) -> ChannelOptions:
    changed = {"grpc.min_reconnect_backoff_ms": TLS_CONNECT_MS} if tls else {}
    return tuple((name, changed.get(name, value)) for name, value in CLIENT_OPTIONS)


SERVER_OPTIONS: ChannelOptions = (
    # Without these the server takes the clients' pings for an attack and closes the connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # The server pings too: a session whose client has vanished must free its KV slots.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 4000),
    # A client that connects and stays silent keeps no connection for gRPC's two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
# Clients of Generation may be anywhere, on slow links, and their outputs may pause for long.
FRONT_CLIENT_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
FRONT_SERVER_OPTIONS: ChannelOptions = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A client that has vanished is noticed within half a minute; one that closes its end at once.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; the client's next one opens another
    ("grpc.max_concurrent_streams", 1000),  # of a connection; further calls wait in the client's gRPC
    ("grpc.max_metadata_size", 16 * 1024),
)
