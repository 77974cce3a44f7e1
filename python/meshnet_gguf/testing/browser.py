"""A headless Chromium that tests drive; what Bazel fetched for them is in $CHROMIUM.

async with open_browser() as browser:
    page = await browser.new_page()
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import AsyncIterator

from playwright.async_api import Browser, async_playwright

__all__ = ["open_browser"]

# The browser's own fonts alone: a page looks and breaks the same on every machine.
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""
_FLAGS = (
    "--headless=shell",
    "--no-sandbox",  # which would want user namespaces; the pages are ours
    "--no-zygote",
    "--disable-gpu",
    "--disable-webgl",
)


def _program() -> pathlib.Path:
    return pathlib.Path(os.environ["CHROMIUM"]).resolve()


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """A browser with no state of earlier ones."""
    program = _program()
    with tempfile.TemporaryDirectory(prefix="meshnet-browser-") as folder:
        fonts = pathlib.Path(folder) / "fonts.conf"
        fonts.write_text(_FONTS.format(fonts=program.parent / "fonts", cache=f"{folder}/cache"))
        environment: dict[str, str | float | bool] = {
            "FONTCONFIG_FILE": str(fonts),
            "HOME": folder,
            "LD_LIBRARY_PATH": str(program.parent / "lib"),
            "PATH": os.environ.get("PATH", ""),
        }
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=program, args=_FLAGS, env=environment
            )
            try:
                yield browser
            finally:
                await browser.close()
