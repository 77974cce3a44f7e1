"""A real web server for an artifact's files, with faults that tests switch on.

    with ModelServer(folder) as server:
        server.fault = lambda request: Answer(status=503) if request.number == 0 else None
        ... server.url, server.requests

By itself it serves ranges, If-Range, strong entity tags and Content-Length. With `tls` it speaks
https under a certificate of its own, in `server.ca_file`.
"""

from __future__ import annotations

import datetime
import hashlib
import http.server
import ipaddress
import pathlib
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Answer", "ModelServer", "Request"]

_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """What came. `number` counts from 0; `range` is [begin, end) as asked for, if it was."""

    number: int
    file: str
    range: tuple[int, int] | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """How an answer differs from the right one.

    `headers` replace those of the same name, None leaves one out. `body` turns the right bytes into
    others; `cut` sends only so many bytes and hangs up. `before_byte` is called with the number of
    bytes sent so far, before more are.
    """

    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: Callable[[bytes], bytes] = lambda content: content
    cut: int | None = None
    before_byte: Callable[[int], None] = lambda sent: None


class ModelServer:
    """Serves the files of a folder on the loopback interface. Keeps its files in memory."""

    def __init__(self, folder: pathlib.Path, *, tls: pathlib.Path | None = None) -> None:
        """`tls` is a folder for the certificate."""
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.fault: Callable[[Request], Answer | None] = lambda request: None
        self.requests: list[Request] = []
        self.has_ranges = True
        self.ca_file: pathlib.Path | None = None
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        scheme = "http"
        if tls is not None:
            scheme = "https"
            self.ca_file = tls / "ca.pem"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*_certificate(self.ca_file, tls / "key.pem"))
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> ModelServer:
        """Serves."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, handler: http.server.BaseHTTPRequestHandler) -> Request:
        """Notes a request."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        with self._lock:
            request = Request(
                len(self.requests),
                unquote(handler.path.rpartition("/")[2]),
                (int(match[1]), int(match[2]) + 1) if match else None,
                dict(handler.headers.items()),
            )
            self.requests.append(request)
        return request

    def asked_bytes(self) -> int:
        """Bytes of all ranges asked for, and of whole files."""
        return sum(
            request.range[1] - request.range[0]
            if request.range
            else len(self.files.get(request.file, b""))
            for request in self.requests
        )


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    owner: ModelServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Says nothing."""

    def do_GET(self) -> None:
        owner = self.server.owner
        request = owner.asked(self)
        answer = owner.fault(request) or Answer()
        content = owner.files.get(request.file)
        if content is None:
            self._send(404, {"Content-Length": "0"}, b"", answer)
            return
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        status = 200
        body = content
        is_same = self.headers.get("If-Range", tag) == tag
        if request.range and owner.has_ranges and is_same:
            begin, end = request.range
            body = content[begin:end]
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{begin + len(body) - 1}/{len(content)}"
        headers["Content-Length"] = str(len(body))
        self._send(status, headers, body, answer)

    def _send(self, status: int, headers: dict[str, str], body: bytes, answer: Answer) -> None:
        body = answer.body(body)
        self.send_response(answer.status or status)
        for name, value in (headers | dict(answer.headers)).items():
            if value is not None:
                self.send_header(name, value)
        if "Content-Length" in answer.headers and answer.headers["Content-Length"] is None:
            self.send_header("Connection", "close")
        self.end_headers()
        limit = len(body) if answer.cut is None else answer.cut
        for begin in range(0, limit, _PIECE_BYTES):
            answer.before_byte(begin)
            self.wfile.write(body[begin : min(begin + _PIECE_BYTES, limit)])
        if answer.cut is not None:
            self.close_connection = True


def _certificate(path: pathlib.Path, key_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "model server of a test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path, key_path
