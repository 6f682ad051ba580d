"""HTTPS: who is spoken to, and certificates that are replaced while it serves."""

import logging
import ssl

import httpx2 as httpx
import pytest

from crossdraft.rpc.security import FrontFiles, TlsError
from crossdraft.rpc.server import Listening
from crossdraft.serving.http import make_app
from crossdraft.serving.http.server import HttpServer
from tests.rpc.certificates import Cluster
from tests.serving.fakes import FakeBackend


def files(cluster: Cluster, hosts: tuple[str, ...] = ("127.0.0.1",)) -> FrontFiles:
    made = cluster.files("front", hosts)
    return FrontFiles(made.certificate, made.key)


def server(shown: FrontFiles | None, host: str = "127.0.0.1", outputs: FakeBackend | None = None) -> HttpServer:
    return HttpServer(make_app(outputs or FakeBackend()), Listening(host, grace_seconds=0, tls=shown))


def client(url: str, cluster: Cluster) -> httpx.AsyncClient:
    trusting = ssl.create_default_context(cafile=str(cluster.folder / "ca.pem"))
    return httpx.AsyncClient(base_url=url, verify=trusting, timeout=60)


async def asked(url: str, cluster: Cluster) -> int:
    async with client(url, cluster) as asking:
        return (await asking.get("/health")).status_code


async def test_a_renewed_certificate_is_served_to_new_connections_without_a_restart(cluster, caplog):
    shown, outputs = files(cluster), FakeBackend(waits_after=1)
    async with server(shown, outputs=outputs) as serving:
        url = f"https://{serving.address}"
        asking = {"prompt": "Say", "stream": True}
        async with client(url, cluster) as early, early.stream("POST", "/v1/completions", json=asking) as reply:
            files(cluster, ("10.1.2.3",))
            with pytest.raises(httpx.ConnectError, match="mismatch"):
                await asked(url, cluster)
            outputs.go_on.set()
            assert (await reply.aread()).endswith(b"data: [DONE]\n\n")  # what is open goes on
        shown.key.write_text("half written")
        with pytest.raises(httpx.ConnectError, match="mismatch"):
            await asked(url, cluster)
        files(cluster)
        assert await asked(url, cluster) == 200
        with pytest.raises(httpx.TransportError):
            await asked(url.replace("https", "http"), cluster)
        assert await asked(url, cluster) == 200
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = [record.getMessage() for record in warnings if record.name != "asyncio"]  # others' come late
    assert len(said) == 1
    assert said[0].startswith("the certificate was not renewed, the one before is used on: ")


async def test_it_does_not_start_with_files_that_it_cannot_use(cluster: Cluster) -> None:
    shown = files(cluster)
    shown.key.unlink()
    with pytest.raises(TlsError, match="there is no file"):
        await server(shown).start()


@pytest.mark.parametrize("secured", [False, True])
async def test_a_port_that_is_open_to_others_in_plaintext_is_said(cluster, caplog, secured):
    async with server(files(cluster) if secured else None, "0.0.0.0"):
        pass
    assert ("is open to whoever can reach it" in caplog.text) is not secured
