"""Pictures of the status page, for people to look at:

tools/bazel run //python/meshnet_gguf/gateway/tests:page_pictures -- FOLDER
"""

from __future__ import annotations

import asyncio
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence

from meshnet_gguf.testing.browser import open_browser
from meshnet_gguf.testing.page_mesh import MODEL, PageMesh, page_mesh
from playwright.async_api import Browser, Page, expect

_SIZES = {"phone": (390, 844), "narrow": (320, 640), "tablet": (820, 1100), "wide": (1440, 900)}


async def _open(browser: Browser, mesh: PageMesh, size: str, scheme: str) -> Page:
    width, height = _SIZES[size]
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=1,
    )
    page = await context.new_page()
    await page.goto(mesh.url)
    await expect(page.get_by_role("heading", name=MODEL, exact=True)).to_be_visible()
    return page


async def _take(page: Page, folder: pathlib.Path, name: str) -> None:
    await page.screenshot(path=folder / f"{name}.png", full_page=True)
    sys.stdout.write(f"{folder / name}.png\n")


async def _talk_on(page: Page) -> None:
    """Five more turns, each answer stopped once it has begun, and one under way."""
    for turn in range(5):
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_label("Message").fill(f"And then? {'Go on, please. ' * 3 * turn}")
        await page.get_by_label("Message").press("Enter")
        answer = page.locator(".turn.assistant").nth(turn + 1)
        await expect(answer).to_contain_text(re.compile(r"\S{9}"), timeout=60_000)


async def _pictures(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            open_browser() as browser,
            page_mesh(pathlib.Path(scratch), "--admit_dark") as mesh,
        ):
            load = asyncio.gather(mesh.answer(3000), mesh.answer(3000))
            pages = {
                f"{size}-{scheme}": await _open(browser, mesh, size, scheme)
                for size in _SIZES
                for scheme in ("light", "dark")
            }
            talking = {name: page for name, page in pages.items() if "tablet" not in name}
            for page in talking.values():
                await page.get_by_label("Message").fill("Tell me of the sea, please.")
                await page.get_by_label("Message").press("Enter")
            for name, page in pages.items():
                await expect(page.get_by_text("not measured")).to_have_count(0, timeout=60_000)
                if name in talking:
                    answer = page.locator(".turn.assistant")
                    await expect(answer).to_contain_text(re.compile(r"\S{9}"), timeout=60_000)
                await _take(page, folder, name)
            for name in ("phone-dark", "wide-light"):
                await _talk_on(pages[name])
                await _take(pages[name], folder, f"{name}-long")
            await mesh.kill("office-pc")
            await asyncio.gather(load, return_exceptions=True)
            for name, page in pages.items():
                await expect(page.locator(".problem")).to_contain_text("(lost)", timeout=60_000)
                if name in talking:
                    await expect(page.locator(".turn .failure")).to_be_visible(timeout=60_000)
                await _take(page, folder, f"{name}-killed")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) != 2 or arguments[1].startswith("-"):
        asked = arguments[1:] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(f"{__doc__}\n")
        return 0 if asked else 2
    folder = pathlib.Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_pictures(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
