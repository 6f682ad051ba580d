"""Every status code means one error, and every error is sent as a code that means it again."""

import errno
import re
from socket import EAI_NONAME, gaierror

import pytest
from grpc import StatusCode

from crossdraft.rpc import errors
from crossdraft.rpc.errors import MEANINGS, ServiceError
from crossdraft.rpc.links import TargetClient
from tests.rpc.linked import OPEN, Heard, all_lost, raw_service


def kinds(base: type[ServiceError]) -> list[type[ServiceError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize("code", [code for code in StatusCode if code is not StatusCode.OK])
def test_every_status_is_an_error_that_names_the_service(code):
    error = errors.from_status(code, "the details", "target at host:1")
    assert type(error) is MEANINGS[code]
    assert "target at host:1: the details" in str(error)
    assert code.name in str(errors.from_status(code, None, "drafter at host:1"))


@pytest.mark.parametrize("kind", kinds(ServiceError))
def test_an_error_that_is_sent_has_a_status_and_arrives_as_itself(kind):
    assert {*MEANINGS.values()} <= {*kinds(ServiceError)}
    code, text = errors.to_status(kind("what to change"))
    assert code is not StatusCode.OK
    if kind in MEANINGS.values():
        assert text == "what to change"
        assert type(errors.from_status(code, text, "target at host:1")) is kind


def test_a_bad_message_arrives_as_a_bad_request_and_texts_stay_below_the_limit_of_headers() -> None:
    assert errors.to_status(errors.BadMessage("text"))[0] is StatusCode.INVALID_ARGUMENT
    assert len(errors.to_status(errors.BadRequest("x" * 100_000))[1]) == errors.MAX_TEXT


@pytest.mark.parametrize("letter", ["\n", "\u20ac", "\U0001f600", "\ud800"])
async def test_a_long_text_of_any_letters_ends_a_link_and_not_its_connection(letter: str) -> None:
    async with raw_service() as (raw, address), TargetClient(address) as client:
        await client.describe()
        heard = Heard()
        client.begin(OPEN, heard)
        stream, _ = await raw.frame()
        stream.end(*errors.to_status(errors.NotServed(letter * 100_000)))
        assert [type(error) for error in await all_lost([heard])] == [errors.NotServed]


@pytest.mark.parametrize(
    ("error", "why", "change"),
    [
        (OSError(errno.EADDRINUSE, "taken"), "Address already in use", "choose another port, or 0 for any"),
        (OSError(errno.EACCES, "no"), "Permission denied", "choose another port, or 0 for any"),
        (OSError(errno.EADDRNOTAVAIL, "no"), "Cannot assign requested address", "choose an address of this machine"),
        (gaierror(EAI_NONAME, "unknown"), r"the host has no address \(unknown\)", "choose an address of this machine"),
    ],
)
def test_a_server_that_cannot_listen_says_whether_port_or_host_is_at_fault(error, why, change):
    assert re.fullmatch(f"cannot listen on h:1: {why}; {change}[^;]*", str(errors.CannotListen.at("h:1", error)))


def test_faults_of_the_service_say_that_another_may_do_and_faults_of_the_request_do_not():
    services = StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL
    requests = StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE, StatusCode.FAILED_PRECONDITION
    for code in (*services, *requests):
        assert errors.from_status(code, "text", "target").lost == (code in services)


def test_no_room_says_when_to_ask_again_and_is_not_a_message_too_large():
    sent = errors.Overloaded("no room", after=1.5)
    ((key, value),) = errors.to_trailer(sent)
    assert (key, value) == ("grpc-retry-pushback-ms", "1500")
    code, text = errors.to_status(sent)
    assert code is StatusCode.RESOURCE_EXHAUSTED
    arrived = errors.from_status(code, text, "server at host:1", value)
    assert (type(arrived), arrived.after) == (errors.Overloaded, 1.5)
    assert type(errors.from_status(code, text, "server at host:1")) is errors.TooLarge
    assert errors.to_trailer(errors.TooLarge("text")) == ()
    for no_time in ("-1", "soon", "1.5", b"\xff"):
        assert type(errors.from_status(code, "text", "server at host:1", no_time)) is errors.TooLarge


def test_what_grpc_says_of_a_broken_write_and_of_a_service_that_speaks_http_1() -> None:
    error = errors.from_status(StatusCode.INTERNAL, errors.BROKEN_WRITE, "target at host:1")
    assert type(error) is errors.Unreachable  # the end of a call has broken it
    text = "Failed parsing HTTP/2 (...) (Trying to connect an http1.x server (HTTP status 400))"
    error = errors.from_status(StatusCode.UNAVAILABLE, text, "target at host:1")
    assert str(error).startswith("target at host:1: it speaks HTTP/1, not gRPC: with --target and --drafter give")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("target at 10.0.0.1:7001: it is full", "target: it is full"),
        ("target at [::1]:7001: it is full", "target: it is full"),
        ("what listens at host-a.svc:7001 is no target", "what listens is no target"),
        ("all addresses; last error: ipv6:%5B::1%5D:7001: Failed", "all addresses; last error:: Failed"),
        ("it is not target at 10.0.0.1:7001.", "it is not target."),
        ("[Errno 111] Connect call failed ('127.0.0.1', 80)", "[Errno 111] Connect call failed "),
        ("logit_bias.5: id 5: 7 of 8, a:b", "logit_bias.5: id 5: 7 of 8, a:b"),
    ],
)
def test_a_text_for_clients_has_no_address(text, shown):
    assert errors.without_addresses(text) == shown
