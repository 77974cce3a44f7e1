"""Where an artifact's files can be had: local folders and web servers.

    async with open_source("https://example.org/models/v4") as source:
        await source.fetch(file, 0, 4096, sink)

A source hands out ranges of bytes and judges only what a hash cannot: sizes, ranges, encodings,
whether it is still the file that it was. Whoever fetches checks the bytes.

A server may lack ranges (`has_ranges` turns False at the first answer that ignores one); then only
fetches from offset 0 on are possible. Everything that goes wrong is a SourceError with one of the
table's reasons; `may_pass` tells whether asking again can help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import ssl
import stat
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import httpx
from meshnet.transport import is_loopback

from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import ManifestFile, check_set
from meshnet_gguf.threads import in_thread
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["FolderSource", "HttpSource", "Sink", "Source", "SourceError", "open_sources"]

# Takes the next bytes of a fetch.
Sink = Callable[[memoryview], None]

_PIECE_BYTES = 1 << 20
_MAX_REDIRECTS = 5
_MAX_RETRY_AFTER_MS = 60_000
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_UNSATISFIED_RANGE = re.compile(r"bytes \*/(\d{1,18})")
_SILENCE_SECONDS = 30.0
# A server below this is as good as gone, and its fetch is tried again elsewhere.
_LEAST_BYTES_PER_SECOND = 16 << 10


class SourceError(MeshnetError):
    """A source failed. With `may_pass` it may answer later, at the earliest in retry_after_ms."""

    def __init__(
        self, reason: int, message: str, *, may_pass: bool = False, retry_after_ms: int = 0
    ) -> None:
        super().__init__(reason, message, retry_after_ms=retry_after_ms)
        self.may_pass = may_pass


class Source(Protocol):
    """One place that holds an artifact's files."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def has_ranges(self) -> bool:
        """Whether a fetch may begin elsewhere than at offset 0, as far as is known."""

    async def fetch(self, file: ManifestFile, offset: int, length: int, sink: Sink) -> None:
        """Gives exactly `length` bytes from `offset` on to the sink, in order.

        Raises SourceError, and whatever the sink raises. What the sink got by then counts.
        """

    async def check(self, files: tuple[ManifestFile, ...]) -> None:
        """Looks whether the place as a whole can be the artifact's.

        Raises MeshnetError.
        """


class FolderSource:
    """A local folder."""

    has_ranges = True

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    async def check(self, files: tuple[ManifestFile, ...]) -> None:
        """Every file is there in its size, and none that calls itself another part of the set."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError as error:
            raise self._unreadable(self._folder, error) from error
        check_set(names, [file.name for file in files], self.name)
        for file in files:
            descriptor = self._open(file)
            os.close(descriptor)

    async def fetch(self, file: ManifestFile, offset: int, length: int, sink: Sink) -> None:
        """See Source."""
        await in_thread(self._copy, file, offset, length, sink)

    def _copy(self, file: ManifestFile, offset: int, length: int, sink: Sink) -> None:
        descriptor = self._open(file)
        try:
            buffer = bytearray(min(_PIECE_BYTES, length))
            view = memoryview(buffer)
            end = offset + length
            while offset < end:
                try:
                    got = os.preadv(descriptor, [view[: end - offset]], offset)
                except OSError as error:
                    raise self._unreadable(self._folder / file.name, error) from error
                if got == 0:
                    raise SourceError(
                        errors_pb2.REASON_SOURCE_CHANGED,
                        f"{self._folder / file.name} became shorter while it was read, at {offset}",
                    )
                sink(view[:got])
                offset += got
        finally:
            os.close(descriptor)

    def _open(self, file: ManifestFile) -> int:
        path = self._folder / file.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._unreadable(path, error) from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == file.bytes:
            return descriptor
        os.close(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._unreadable(path, OSError(0, "not a regular file"))
        raise _wrong_size(str(path), file, status.st_size)

    @staticmethod
    def _unreadable(path: pathlib.Path, error: OSError) -> SourceError:
        return SourceError(
            errors_pb2.REASON_ARTIFACT_UNREADABLE, f"cannot read {path} ({error.strerror})"
        )


class HttpSource:
    """A folder on a web server: a file lies at the base address plus its name.

    Plaintext is for loopback alone. At most five redirects are followed, each under the same rule,
    and none leads from https to plaintext.
    """

    def __init__(
        self,
        base: str,
        *,
        tls: ssl.SSLContext | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        self._silence_seconds = silence_seconds
        self.name = base
        self.has_ranges = True
        self._base = base.rstrip("/") + "/"
        parsed = _checked_url(self._base, self._base)
        if parsed.query or parsed.fragment:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                f"expected the address of a folder without ? and #, got {base}",
            )
        # A proxy that the environment names is for what lies beyond this machine.
        self._client = httpx.AsyncClient(
            verify=tls or ssl.create_default_context(),
            timeout=httpx.Timeout(silence_seconds, pool=None),
            trust_env=not _stays_here(parsed.hostname or ""),
            headers={"Accept-Encoding": "identity", "User-Agent": "meshnet"},
            limits=httpx.Limits(max_connections=None),
        )
        # The first question goes alone: what is wrong with a server shows once.
        self._first = asyncio.Lock()
        self._has_answered = False
        # What tells one state of a file from another, by the file's name.
        self._validators: dict[str, tuple[str | None, str | None]] = {}

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def check(self, files: tuple[ManifestFile, ...]) -> None:
        """A web server cannot be asked what it holds."""

    async def fetch(self, file: ManifestFile, offset: int, length: int, sink: Sink) -> None:
        """See Source."""
        url = self._base + urllib.parse.quote(file.name)
        limit = self._silence_seconds + length / _LEAST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(limit), contextlib.AsyncExitStack() as stack:
                if self._has_answered:
                    response = await self._ask(stack, url, file, offset, length)
                else:
                    async with self._first:
                        response = await self._ask(stack, url, file, offset, length)
                        self._has_answered = True
                await self._take(response, url, length, sink)
        except TimeoutError as error:
            raise SourceError(
                errors_pb2.REASON_SOURCE_UNAVAILABLE,
                f"{url}: expected {length} bytes within {limit:.0f} s",
                may_pass=True,
            ) from error
        except httpx.InvalidURL as error:
            raise SourceError(
                errors_pb2.REASON_SOURCE_ANSWER_INVALID, f"{url}: redirected nowhere ({error})"
            ) from error
        except httpx.HTTPError as error:
            raise SourceError(
                errors_pb2.REASON_SOURCE_UNAVAILABLE,
                f"{url}: {_words(error)}",
                may_pass=not _is_certificate_error(error),
            ) from error

    async def _ask(
        self,
        stack: contextlib.AsyncExitStack,
        url: str,
        file: ManifestFile,
        offset: int,
        length: int,
    ) -> httpx.Response:
        headers = {}
        wants_range = self.has_ranges and length != file.bytes
        if wants_range:
            headers["Range"] = f"bytes={offset}-{offset + length - 1}"
            etag, modified = self._validators.get(file.name, (None, None))
            # A weak tag is no promise about bytes.
            if etag and not etag.startswith("W/"):
                headers["If-Range"] = etag
            elif modified and not etag:
                headers["If-Range"] = modified
        response = await self._follow(stack, url, headers)
        self._check_status(response, url, file)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise _bad_answer(url, f"expected the bytes as they are, got them in {encoding!r}")
        self._check_same(response, url, file)
        declared = response.headers.get("Content-Length")
        if declared is not None and not (declared.isascii() and declared.isdigit()):
            raise _bad_answer(url, f"expected a Content-Length in bytes, got {declared[:40]!r}")
        if response.status_code == 206:
            self._check_range(response, url, file, offset, length, declared)
            return response
        if declared is not None and int(declared) != file.bytes:
            raise _wrong_size(url, file, int(declared))
        if wants_range:
            self.has_ranges = False
            if offset:
                raise SourceError(
                    errors_pb2.REASON_SOURCE_ANSWER_INVALID,
                    f"{url}: the server has no ranges",
                    may_pass=True,
                )
        return response

    async def _follow(
        self, stack: contextlib.AsyncExitStack, url: str, headers: dict[str, str]
    ) -> httpx.Response:
        at = url
        for _ in range(_MAX_REDIRECTS + 1):
            request = self._client.build_request("GET", at, headers=headers)
            response = await stack.enter_async_context(_sent(self._client, request))
            if response.next_request is None:
                return response
            before, at = at, str(response.next_request.url)
            if _checked_url(at, url).scheme != "https" and before.startswith("https:"):
                # Also to this machine's own servers, which nobody else should reach through us.
                raise SourceError(
                    errors_pb2.REASON_INSECURE_TRANSPORT,
                    f"expected no redirect from https to {at} (asked for {url})",
                )
        raise _bad_answer(url, f"expected at most {_MAX_REDIRECTS} redirects, got more")

    @staticmethod
    def _check_status(response: httpx.Response, url: str, file: ManifestFile) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status == 416 and (
            match := _UNSATISFIED_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        ):
            raise _wrong_size(url, file, int(match[1]))
        if status in (404, 410):
            raise SourceError(
                errors_pb2.REASON_ARTIFACT_INCOMPLETE,
                f"{url}: the server has no such file (status {status})",
            )
        may_pass = status in _RETRIED_STATUS
        raise SourceError(
            errors_pb2.REASON_SOURCE_UNAVAILABLE
            if may_pass
            else errors_pb2.REASON_SOURCE_ANSWER_INVALID,
            f"{url}: expected status 206 or 200, got {status}",
            may_pass=may_pass,
            retry_after_ms=_retry_after_ms(response.headers.get("Retry-After", "")),
        )

    def _check_same(self, response: httpx.Response, url: str, file: ManifestFile) -> None:
        now = (response.headers.get("ETag"), response.headers.get("Last-Modified"))
        first = self._validators.setdefault(file.name, now)
        if first != now:
            before, after = (" ".join(filter(None, pair)) or "none" for pair in (first, now))
            raise SourceError(
                errors_pb2.REASON_SOURCE_CHANGED,
                f"{url}: the file changed while it was fetched, from {before} to {after}; "
                "what agreed with the manifest is kept",
            )

    @staticmethod
    def _check_range(
        response: httpx.Response,
        url: str,
        file: ManifestFile,
        offset: int,
        length: int,
        declared: str | None,
    ) -> None:
        text = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None:
            raise _bad_answer(url, f"expected a Content-Range in bytes, got {text[:80]!r}")
        begin, end, size = map(int, match.groups())
        if size != file.bytes:
            raise _wrong_size(url, file, size)
        if (begin, end) != (offset, offset + length - 1):
            raise _bad_answer(
                url, f"expected bytes {offset} to {offset + length - 1}, got {begin} to {end}"
            )
        if declared is not None and int(declared) != length:
            raise _bad_answer(url, f"expected {length} bytes, {declared} declared")

    async def _take(self, response: httpx.Response, url: str, length: int, sink: Sink) -> None:
        left = length
        async for piece in _pieces(response):
            if len(piece) > left and response.status_code == 206:
                raise _bad_answer(url, f"expected {length} bytes, got more")
            await in_thread(sink, memoryview(piece)[:left])
            left -= min(left, len(piece))
            if left == 0 and response.status_code == 200:
                return  # the rest of a whole file, which nobody wants
        if left:
            raise SourceError(
                errors_pb2.REASON_SOURCE_ANSWER_INVALID,
                f"{url}: the answer was cut short, {left} of {length} bytes did not come",
                may_pass=True,
            )


async def _pieces(response: httpx.Response) -> AsyncIterator[bytearray]:
    """What comes, in pieces worth a thread's while."""
    piece = bytearray()
    try:
        async for data in response.aiter_raw():
            piece += data
            if len(piece) >= _PIECE_BYTES:
                yield piece
                piece = bytearray()
    except httpx.HTTPError:
        if piece:  # what came before the connection broke
            yield piece
        raise
    if piece:
        yield piece


@contextlib.asynccontextmanager
async def _sent(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    response = await client.send(request, stream=True, follow_redirects=False)
    try:
        yield response
    finally:
        await response.aclose()


def _checked_url(url: str, asked: str) -> urllib.parse.SplitResult:
    """Raises MeshnetError: INSECURE_TRANSPORT, CONFIGURATION_INVALID."""
    try:
        parsed = urllib.parse.urlsplit(url)
        host = parsed.hostname
    except ValueError:
        host = None
    if not host or parsed.scheme not in ("https", "http"):
        raise SourceError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected https://HOST/FOLDER, got {url} (asked for {asked})",
        )
    if parsed.scheme == "http" and not _stays_here(host):
        raise SourceError(
            errors_pb2.REASON_INSECURE_TRANSPORT,
            f"expected https beyond loopback, got {url} (asked for {asked})",
        )
    return parsed


def _stays_here(host: str) -> bool:
    return is_loopback(f"{host}:0")


def _bad_answer(url: str, what: str) -> SourceError:
    return SourceError(errors_pb2.REASON_SOURCE_ANSWER_INVALID, f"{url}: {what}")


def _wrong_size(where: str, file: ManifestFile, size: int) -> SourceError:
    return SourceError(
        errors_pb2.REASON_ARTIFACT_MISMATCH,
        f"{where}: expected {file.bytes} bytes by the manifest, there are {size}; "
        "it is another file",
    )


def _retry_after_ms(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9:
        return min(int(text) * 1000, _MAX_RETRY_AFTER_MS)
    return 0


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.asynccontextmanager
async def open_sources(
    places: Iterable[str],
    *,
    ca_file: pathlib.Path | None = None,
    silence_seconds: float = _SILENCE_SECONDS,
) -> AsyncIterator[list[Source]]:
    """The sources that these texts name: addresses, or else folders.

    `ca_file` (PEM) replaces the authorities that the system trusts. A server that says nothing for
    `silence_seconds`, or sends less than 16 KiB/s in the long run, counts as gone.

    Raises MeshnetError: CONFIGURATION_INVALID, INSECURE_TRANSPORT.
    """
    try:
        tls = ssl.create_default_context(cafile=str(ca_file)) if ca_file else None
    except (OSError, ssl.SSLError) as error:
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID,
            f"expected a PEM file with certificates of authorities, cannot use {ca_file} ({error})",
        ) from error
    async with contextlib.AsyncExitStack() as stack:
        sources: list[Source] = []
        for place in places:
            if "://" in place:
                source = HttpSource(place, tls=tls, silence_seconds=silence_seconds)
                stack.push_async_callback(source.aclose)
                sources.append(source)
            else:
                sources.append(FolderSource(pathlib.Path(place)))
        if not sources:
            raise MeshnetError(
                errors_pb2.REASON_CONFIGURATION_INVALID,
                "expected at least one source of the artifact's files, got none",
            )
        yield sources
