"""What a server shows of itself in a TLS handshake, whatever it speaks behind it."""

from __future__ import annotations

import socket
import ssl

from meshnet.certificates import describe
from meshnet.transport import TlsFiles

__all__ = ["client_context", "shown_serial"]


def client_context(tls: TlsFiles, *, nameless: bool = False) -> ssl.SSLContext:
    """Who trusts these authorities and shows this certificate; none when `nameless`."""
    context = ssl.create_default_context(cafile=tls.authority)
    if not nameless:
        context.load_cert_chain(tls.certificate, tls.key)
    # gRPC's servers want it; others choose the second.
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def shown_serial(endpoint: str, context: ssl.SSLContext) -> str:
    """Of the certificate that the server at a port of this machine shows. Raises OSError."""
    port = int(endpoint.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    (facts,) = describe(ssl.DER_cert_to_PEM_cert(shown).encode())
    return facts.serial
