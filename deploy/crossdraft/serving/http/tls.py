"""TLS of the HTTP front: its certificate, which is read again when its files were replaced."""

import logging
import ssl

from crossdraft.rpc.security import NOT_RENEWED, FrontFiles, TlsError

log = logging.getLogger(__name__)


class Certified:
    """The TLS of a server, as its files are at each connection.

    Args:
        files: certificate and key.

    Raises:
        TlsError: they cannot be used now.
    """

    def __init__(self, files: FrontFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._latest = _context(files)
        self.context = self._latest  # what the server listens with
        self.context.sni_callback = self._renewed

    def _renewed(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake, whether the client names a host or not."""
        stamp = self._files.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._latest = _context(self._files)
            except (TlsError, OSError) as error:  # while files are being replaced one after another
                log.warning(NOT_RENEWED, error)
        connection.context = self._latest


def _context(files: FrontFiles) -> ssl.SSLContext:
    files.load()  # for its errors, which say more than those of ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["http/1.1"])
    return context
