"""The status page: a few files, served as they are, that need nothing from anywhere else.

The page itself holds no data. What it shows it asks for under the same rules as everybody
(/status/events, /v1/chat/completions), and its policy keeps the browser from running or fetching
anything that is not one of these files.
"""

from __future__ import annotations

import hashlib
import pathlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_FOLDER = pathlib.Path(__file__).parent / "page"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_START = "index.html"
_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # No text ever becomes markup: names and reasons come from anybody.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # A new release of the gateway is a new page at once; the tag saves sending the same again.
    "cache-control": "no-cache",
}


class _File:
    def __init__(self, path: pathlib.Path) -> None:
        self._content = path.read_bytes()
        self._headers = {
            **_HEADERS,
            "content-type": _TYPES[path.suffix],
            "etag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"',
        }

    async def __call__(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def page_routes() -> list[Route]:
    """The page at /, and its parts below /page."""
    return [
        Route("/" if path.name == _START else f"/page/{path.name}", _File(path).__call__)
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
    ]
