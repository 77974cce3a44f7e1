"""The status page in a real browser: over real nodes that are killed, and with statuses made up."""

import asyncio
import contextlib
import itertools
import json
import pathlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from meshnet_gguf.gateway import ApiKeys, GatewayOptions
from meshnet_gguf.status import (
    Admission,
    GatewayStatus,
    LaneStatus,
    LaneWorker,
    Memory,
    MeshStatus,
    MixtureStatus,
    ModelStatus,
    Problem,
    SeamStatus,
    StageState,
    StageStatus,
    Work,
    status_to_json,
)
from meshnet_gguf.testing.browser import open_browser
from meshnet_gguf.testing.gateway import fake_gateway
from meshnet_gguf.testing.page_mesh import MODEL, PageMesh, page_mesh
from playwright.async_api import Browser, ConsoleMessage, Page, Request, Route, expect

END = 120.0  # seconds after which a test that hangs is given up
WAIT = 60_000.0  # the same for one condition, in milliseconds
WIDTHS = (320, 360, 390, 820, 1440)
AA = 4.5

# One browser and one mesh for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")
expect.set_options(timeout=WAIT)

# ---- What a page is asked ----

# Of every text that is shown: its colour and what it stands on, with the text.
COLOURS = """() => {
  const opaque = (colour) => colour && !/rgba\\(.*, 0\\)|transparent|none/.test(colour);
  const ground = (node) => {
    const box = node.closest?.("svg g")?.querySelector(".box");
    if (box) return getComputedStyle(box).fill;
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !parent.checkVisibility()) continue;
    const svg = parent.ownerSVGElement;
    const colour = svg ? getComputedStyle(parent).fill : getComputedStyle(parent).color;
    found.push([walker.currentNode.data.trim(), colour, ground(parent)]);
  }
  for (const control of document.querySelectorAll("textarea, input, select")) {
    if (control.checkVisibility()) {
      const style = getComputedStyle(control);
      found.push([control.id, style.color, style.backgroundColor]);
    }
  }
  return found;
}"""

# What lies where in the picture: texts that stick out of their box or of the picture.
OUTSIDE = """() => {
  const wrong = [];
  for (const svg of document.querySelectorAll(".picture svg")) {
    const all = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll(".box")].map((box) => box.getBoundingClientRect());
    for (const text of svg.querySelectorAll("text")) {
      if (!text.textContent) continue;
      const own = text.closest("g").querySelector(".box");
      const limits = (own ?? svg).getBoundingClientRect();
      const at = text.getBoundingClientRect();
      const inside = at.left >= limits.left - 1 && at.right <= limits.right + 1 &&
        at.top >= limits.top - 1 && at.bottom <= limits.bottom + 1;
      const over = !own && boxes.some((box) =>
        at.left < box.right && at.right > box.left && at.top < box.bottom && at.bottom > box.top);
      if (!inside || over) wrong.push(text.textContent);
    }
  }
  return wrong;
}"""

# Of each box the part of its track that the layers take: begin and width, of 1.
SHARES = """() => [...document.querySelectorAll(".picture .layers")].map((layers) => {
  const track = layers.closest("g").querySelector(".track").getBoundingClientRect();
  const part = layers.getBoundingClientRect();
  return [(part.left - track.left) / track.width, part.width / track.width];
})"""

# Where everything stands that must not move while numbers change.
PLACES = """() => [...document.querySelectorAll(
    "main, main section, h2, h3, dt, dd, tr, td, .picture svg, .picture .box, .chat, #message"
  )].map((node) => {
    const { x, y, width, height } = node.getBoundingClientRect();
    return [node.tagName, x, y, width, height];
  })"""


def luminance(colour: str) -> float:
    """Of "rgb(r, g, b)", as WCAG reckons it."""
    parts = [int(float(part)) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


async def faint(page: Page) -> list[tuple[str, float]]:
    """Texts with less contrast than AA wants."""
    colours = await page.evaluate(COLOURS)
    assert len(colours) > 3
    found = [(text, contrast(colour, ground)) for text, colour, ground in colours]
    return [(text, value) for text, value in found if value < AA]


async def tree(page: Page) -> list[dict[str, Any]]:
    """What assistive technology sees, as the browser itself reckons it."""
    session = await page.context.new_cdp_session(page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    await session.detach()
    return [
        {
            "role": node.get("role", {}).get("value"),
            "name": node.get("name", {}).get("value", "").strip(),
            **{item["name"]: item["value"].get("value") for item in node.get("properties", ())},
        }
        for node in nodes
        if not node["ignored"]
    ]


async def check_accessible(page: Page) -> None:
    """Every control and picture has a name, and headings come in order."""
    nodes = await tree(page)
    controls = [n for n in nodes if n.get("focusable") and n["role"] != "RootWebArea"]
    assert controls
    assert [node for node in controls if not node["name"]] == []
    assert [node for node in nodes if node["role"] == "image" and not node["name"]] == []
    levels = [int(node["level"]) for node in nodes if node["role"] == "heading"]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


async def check_width(page: Page, width: int) -> None:
    """At this width nothing is wider than the page, and no text sticks out of the picture."""
    await page.set_viewport_size({"width": width, "height": 900})
    await page.wait_for_function(
        "() => [...document.querySelectorAll('.picture svg')].every((svg) =>"
        " svg.viewBox.baseVal.width === Math.floor(svg.parentElement.clientWidth))"
    )
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(OUTSIDE) == []


@contextlib.asynccontextmanager
async def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1440,
    status: MeshStatus | None = None,
    **options: Any,
) -> AsyncIterator[Page]:
    """The page, which must make no error and break none of its policy's rules.

    With `status` it sees that one instead of the gateway's.
    """
    context = await browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = await context.new_page()
    problems: list[str] = []

    def said(message: ConsoleMessage) -> None:
        # A refused request is logged by the browser itself.
        if message.type == "error" and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(url):
            problems.append(request.url)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("console", said)
    page.on("request", asked)
    if status is not None:
        body = b"data: " + status_to_json(status) + b"\n\n"
        await page.route(
            "**/status/events",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
    try:
        await page.goto(url)
        yield page
        assert problems == []
    finally:
        await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PageMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    async with page_mesh(folder, "--admit_dark", status_seconds=0.1, delay="1ms") as running:
        yield running


# ---- Over real nodes ----


async def test_the_route_at_every_width(browser: Browser, mesh: PageMesh) -> None:
    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        boxes = page.locator(".picture g:has(.box)")
        await expect(boxes).to_have_count(3)
        for index, (machine, words) in enumerate(
            (
                ("attic-server", "Layers 0\u20133"),
                ("office-pc", "Layers 4\u20135"),
                ("laptop", "Layers 6\u20137"),
            )
        ):
            await expect(boxes.nth(index)).to_contain_text(machine)
            await expect(boxes.nth(index)).to_contain_text(words)
            await expect(boxes.nth(index)).to_contain_text("Ready")
            await expect(boxes.nth(index)).to_contain_text(re.compile(r"of \d+ [GT]iB"))
        # Nodes have measured the lines to their neighbours: there, there, and back.
        await expect(page.get_by_text("not measured")).to_have_count(0)
        for words in await page.locator(".picture g:has(.link)").all_text_contents():
            assert re.search(r"[\d.]+ (µs|ms)", words), words
            assert re.search(r"[\d.]+ [KMG]iB/s", words), words
        for width in WIDTHS:
            await check_width(page, width)
            shares = await page.evaluate(SHARES)
            assert shares == [
                pytest.approx(part, abs=0.01) for part in ([0, 0.5], [0.5, 0.25], [0.75, 0.25])
            ]


async def test_numbers_are_live_and_nothing_moves(browser: Browser, mesh: PageMesh) -> None:
    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        first = page.locator(".picture g:has(.box)").first
        await expect(page.locator("#active")).to_have_text("0 of 8")
        await expect(page.get_by_text("not measured")).to_have_count(0)
        await expect(page.locator("#rate")).to_have_text("0.0")
        before = await page.evaluate(PLACES)
        answering = asyncio.create_task(mesh.answer(20_000))
        try:
            await expect(page.locator("#active")).to_have_text("1 of 8")
            await expect(first).to_contain_text("1 of 8")
            for figure in await page.locator(".picture .figure").all():
                await expect(figure).not_to_have_text("0.0")
            for row in await page.locator(".stages tbody tr").all():
                await expect(row.locator("td").nth(3)).not_to_have_text("0.0")
                await expect(row.locator("td").nth(5)).to_have_text("1 of 8")
            await expect(page.locator(".problem")).to_be_hidden()
            assert await page.evaluate(PLACES) == before
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        await expect(page.locator("#active")).to_have_text("0 of 8")


# Whether the page is seen.
TURN = (
    "(hidden) => { Object.defineProperty(document, 'hidden', "
    "{ value: hidden, configurable: true }); "
    "document.dispatchEvent(new Event('visibilitychange')); }"
)


async def test_a_page_that_is_not_seen_asks_for_nothing(browser: Browser, mesh: PageMesh) -> None:
    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        await expect(page.locator("#connection")).to_have_text("Live")
        async with page.expect_event("requestfailed") as ended:
            await page.evaluate(TURN, True)
        assert (await ended.value).url.endswith("/status/events")
        await expect(page.locator("#connection")).to_have_text("Paused")
        await page.evaluate(TURN, False)
        await expect(page.locator("#connection")).to_have_text("Live")


async def test_a_gateway_that_is_away_or_silent_is_asked_again(
    browser: Browser, mesh: PageMesh
) -> None:
    async def away(route: Route) -> None:
        await route.abort()

    async def silent(route: Route) -> None:
        asked.set()

    asked, place = asyncio.Event(), "**/status/events"
    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        connection = page.locator("#connection")
        await expect(connection).to_have_text("Live")
        await page.clock.install()
        await page.evaluate(TURN, True)
        await page.route(place, away)
        await page.evaluate(TURN, False)
        await expect(connection).to_have_text("Connection lost, trying again")
        await page.unroute(place)
        await page.clock.fast_forward(2_000)
        await expect(connection).to_have_text("Live")
        await page.evaluate(TURN, True)
        await page.route(place, silent)
        await page.evaluate(TURN, False)
        await asked.wait()
        await expect(connection).to_have_text("Paused")
        await page.clock.fast_forward(11_000)
        await expect(connection).to_have_text("Connection lost, trying again")
        await page.unroute(place)
        await page.clock.fast_forward(2_000)
        await expect(connection).to_have_text("Live")


async def test_a_conversation_with_the_keyboard_alone(browser: Browser, mesh: PageMesh) -> None:
    asked: list[dict[str, Any]] = []

    def sent(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or ""))

    async with asyncio.timeout(END), opened(browser, mesh.url, width=390) as page:
        page.on("request", sent)
        await expect(page.get_by_role("heading", name=MODEL, exact=True)).to_be_visible()
        seen = []
        while (at := await page.evaluate("document.activeElement.id")) != "message":
            await page.keyboard.press("Tab")
            seen.append(await page.evaluate("document.activeElement.outerHTML.slice(0, 40)"))
            assert len(seen) < 10, seen
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert await page.evaluate(outline) == "solid", at
        # What is seen first is reached first: the link to the chat, details, the talk.
        assert ["to-chat" in seen[0], "summary" in seen[1], 'id="talk"' in seen[-2]] == [True] * 3
        await page.keyboard.type("One line")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("and <b>another</b>")
        await page.keyboard.press("Enter")
        answer = page.locator(".turn.assistant").nth(0)
        await expect(answer).to_contain_text(re.compile(r"\S{9}"))
        await expect(page.locator(".turn.user")).to_have_text("YouOne line\nand <b>another</b>")
        await expect(page.get_by_role("log")).to_have_attribute("aria-busy", "true")
        # Shift+Tab leads to nothing but what is there; the answer is stopped by its button.
        stop = page.get_by_role("button", name="Stop")
        await page.keyboard.press("Tab")
        await expect(stop).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(answer).to_contain_text("Stopped.")
        await expect(page.locator("#message")).to_be_focused()
        await expect(page.locator("#active")).to_have_text("0 of 8")
        said = (await answer.locator("b").evaluate("(b) => b.nextSibling.data")) or ""
        await page.keyboard.type("Again")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant")).to_have_count(2)
        assert [m["role"] for m in asked[1]["messages"]] == ["user", "assistant", "user"]
        assert asked[1]["messages"][1]["content"] == said
        assert asked[1]["model"] == MODEL
        await page.get_by_role("button", name="Clear").click()
        await expect(page.locator(".turn")).to_have_count(0)
        await expect(page.locator("#active")).to_have_text("0 of 8")
        # Nothing of it is kept.
        assert await page.evaluate("localStorage.length + sessionStorage.length") == 0


async def test_an_answer_that_just_stops_is_no_whole_one(browser: Browser, mesh: PageMesh) -> None:
    async def cut(route: Route) -> None:
        event = {"choices": [{"delta": {"content": "The sea is"}}]}
        await route.fulfill(body=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        await page.route("**/v1/chat/completions", cut)
        await page.get_by_label("Message").fill("Tell me of the sea.")
        await page.get_by_label("Message").press("Enter")
        await expect(page.locator(".turn.assistant")).to_contain_text("The sea is")
        await expect(page.locator(".turn .failure")).to_have_text("The gateway does not answer.")


async def without_end(route: Route) -> None:
    """Asks for an answer that does not end by itself, which one from random numbers may."""
    asked = json.loads(route.request.post_data or "")
    await route.continue_(post_data=json.dumps({**asked, "ignore_eos": True}))


async def test_a_killed_stage_and_its_return(browser: Browser, mesh: PageMesh) -> None:
    async with asyncio.timeout(END), opened(browser, mesh.url) as page:
        await page.route("**/v1/chat/completions", without_end)
        box = page.locator(".picture g:has(.box)").nth(1)
        await expect(box).to_contain_text("Ready")
        await page.get_by_label("Message").fill("Tell me of the sea.")
        await page.get_by_label("Message").press("Enter")
        await expect(page.locator(".turn.assistant")).to_contain_text(re.compile(r"\S{9}"))
        await mesh.kill("office-pc")
        await expect(box).to_contain_text("Lost")
        await expect(box).to_contain_text(re.compile("PEER_UNREACHABLE|PEER_LOST"))
        await expect(page.locator(".problem")).to_contain_text(
            "without layers 4\u20135 on office-pc (lost)"
        )
        await expect(page.locator("#news")).to_contain_text("layers 4\u20135 on office-pc (lost)")
        await expect(page).to_have_title(f"{MODEL} is down \u2013 meshnet")
        await expect(page.locator(".turn .failure")).to_contain_text(
            re.compile(r"^[A-Z]+_?[A-Z]+: ")
        )
        await expect(page.locator(".stages tbody tr").nth(1)).to_contain_text("Lost")
        assert await faint(page) == []
        await check_width(page, 1440)
        await check_width(page, 320)
        await page.emulate_media(color_scheme="dark")
        assert await faint(page) == []
        await mesh.start("office-pc")
        await expect(box).to_contain_text("Ready")
        await expect(page.locator(".problem")).to_be_hidden()
        await expect(page.locator("#news")).to_have_text(f"{MODEL}: every stage is ready again")
        await expect(page).to_have_title("meshnet")


async def test_both_schemes_can_be_read(browser: Browser, mesh: PageMesh) -> None:
    grounds = []
    async with asyncio.timeout(END):
        for scheme in ("light", "dark"):
            async with opened(browser, mesh.url, color_scheme=scheme) as page:
                await expect(page.locator(".picture .box")).to_have_count(3)
                await page.get_by_text("3 workers").click()
                assert await faint(page) == []
                await check_accessible(page)
                body = "getComputedStyle(document.body)"
                grounds.append(await page.evaluate(f"{body}.backgroundColor"))
                # The edges of controls want less, but enough to be seen.
                edge, ground = await page.evaluate(
                    "() => { const s = getComputedStyle(document.getElementById('message'));"
                    " return [s.borderTopColor, s.backgroundColor]; }"
                )
                assert contrast(edge, ground) >= 3
    light, dark = grounds
    assert luminance(light) > 0.8
    assert luminance(dark) < 0.05


# ---- With statuses made up ----

GIB = 1 << 30
STAGE = StageStatus(
    0,
    20,
    StageState.READY,
    "w0",
    "attic",
    "10.0.0.5:7001",
    engine="llama",
    memory=Memory(3 * GIB, GIB // 2, GIB, 4 * GIB, 16 * GIB),
    work=Work(2, 8, 0, 1200, 3400, 310.4, 12.34),
    refusals={"CACHE_MISS": 2},
)
TAIL = replace(
    STAGE,
    begin=20,
    end=30,
    worker="w1",
    machine="cellar",
    work=replace(STAGE.work, open_sessions=1),
)
HEALTHY = MeshStatus(
    1.0,
    (
        ModelStatus(
            "llama",
            30,
            ("10.0.0.1:7100",),
            stages=(STAGE, TAIL),
            seams=(
                SeamStatus(0, 1, 1500, 100 << 20, 12 << 10, "10.0.0.9:7200"),
                SeamStatus(1, 0, 870, None, 300.0),
            ),
            lanes=(
                LaneStatus("f" * 64, Admission.CERTIFIED, "", ()),
                LaneStatus(
                    "e" * 64,
                    Admission.DARK,
                    "no record of a trusted key",
                    (LaneWorker("w9", "shed", 0, 30, 0, 4, "dark: no record of a trusted key"),),
                ),
            ),
            mixtures=(MixtureStatus("f" * 64, "e" * 64, "", Admission.DARK, "no record for both"),),
        ),
    ),
    GatewayStatus(5.0, 3, 8, 1, 100, 2000, {"RATE_LIMITED": 41, "QUEUE_FULL": 1200}),
)


async def test_every_number_is_shown(browser: Browser, mesh: PageMesh) -> None:
    async with (
        asyncio.timeout(END),
        opened(browser, mesh.url, status=HEALTHY, reduced_motion="reduce") as page,
    ):
        await expect(page.locator("#numbers dd")).to_have_text(["12", "3 of 8", "1", "1,241"])
        await expect(page.locator(".summary")).to_have_text(
            "30 layers · 2 stages · 2 machines · engine llama"
        )
        links = page.locator(".picture g:has(.link)")
        assert await links.nth(0).locator("text").all_text_contents() == [
            "1.5 ms",
            "100 MiB/s",
            "now 12 KiB/s",
            "relayed",
        ]
        assert await links.nth(1).locator("text").all_text_contents() == [
            "tokens back · 870 µs",
            "now 300 B/s",
        ]
        head = page.locator(".picture g:has(.box)").nth(0)
        for words in (
            "attic",
            "10.0.0.5:7001",
            "Layers 0\u201319",
            "20 of 30",
            "4.0 GiB of 16 GiB",
            "12",
        ):
            await expect(head).to_contain_text(words)
        await expect(page.locator(".stages tbody tr").nth(0).locator("td")).to_have_text(
            [
                "0\u201319",
                "w0 on attic",
                "Ready",
                "12",
                "310",
                "2 of 8",
                "3.0 GiB",
                "512 MiB of 1.0 GiB",
            ]
        )
        await expect(page.locator("#refused-table tbody tr").nth(0).locator("td")).to_have_text(
            ["QUEUE_FULL", "gateway", "1,200"]
        )
        await expect(page.locator("#refused-table tbody tr").nth(2).locator("td")).to_have_text(
            ["CACHE_MISS", "w0", "2"]
        )
        # Dark lanes come first, with why.
        lanes = page.locator(".lanes > li")
        await expect(lanes.nth(0)).to_contain_text("Dark, not used no record of a trusted key")
        await expect(lanes.nth(1)).to_contain_text("Dark, not used no record for both")
        await expect(lanes.nth(1)).to_contain_text(
            "mixture of recipe ffffffffffffffff before eeeeeeeeeeeeeeee"
        )
        await expect(lanes.nth(1).locator("details")).to_be_hidden()
        await expect(lanes.nth(2)).to_contain_text("Certified")
        await lanes.nth(0).locator("summary").click()
        await expect(lanes.nth(0)).to_contain_text(
            "layers 0\u201329: w9 on shed, 0 of 4 sessions; not used: dark: no record"
        )
        motion = "getComputedStyle(document.querySelector('.grows')).transitionDuration"
        assert await page.evaluate(motion) == "0s"


async def test_hostile_words_stay_words(browser: Browser, mesh: PageMesh) -> None:
    hostile = "<img src=x onerror=alert(1)>\"'&\u202egpj.exe" + "W" * 300
    stage = replace(
        STAGE,
        end=30,
        state=StageState.LOST,
        worker=hostile,
        machine=hostile,
        endpoint=hostile,
        problem=Problem(hostile, hostile),
        refusals={hostile: 1},
    )
    worker = LaneWorker(hostile, hostile, 0, 30, 0, 1, hostile)
    lane = LaneStatus(hostile, Admission.DARK, hostile, (worker,))
    model = replace(
        HEALTHY.models[0],
        name=hostile,
        problem=Problem(hostile, hostile),
        stages=(stage, replace(stage, state=StageState.READY, problem=None)),
        lanes=(lane,),
    )
    status = replace(HEALTHY, models=(model, HEALTHY.models[0]))
    async with asyncio.timeout(END), opened(browser, mesh.url, status=status) as page:
        await expect(page.locator(".model h2").nth(0)).to_have_text(hostile)
        await expect(page.locator(".problem .reason").nth(0)).to_have_text(hostile)
        assert await page.locator("img").count() == 0
        for width in WIDTHS:
            await check_width(page, width)
        # With two models the chat asks which.
        await expect(page.get_by_label("Model")).to_have_value(hostile)
        await check_accessible(page)


async def test_what_is_missing_is_drawn(browser: Browser, mesh: PageMesh) -> None:
    message = "nobody is known to hold layers [20, 30)"
    gap = StageStatus(20, 30, StageState.MISSING, problem=Problem("NO_ROUTE", message))
    broken = replace(
        HEALTHY.models[0],
        problem=Problem("NO_ROUTE", message),
        stages=(STAGE, gap),
        seams=(SeamStatus(0, 1), SeamStatus(1, 0)),
    )
    nothing = ModelStatus("empty", 0, problem=Problem("NO_ROUTE", "no worker is known"))
    status = replace(HEALTHY, models=(broken, nothing))
    async with asyncio.timeout(END), opened(browser, mesh.url, status=status) as page:
        box = page.locator(".picture g:has(.box)").nth(1)
        for words in ("nobody", "Missing", "NO_ROUTE", "Layers 20\u201329", message):
            await expect(box).to_contain_text(words)
        links = page.locator(".picture text", has_text="not measured")
        await expect(links).to_have_text(["not measured", "tokens back · not measured"])
        await expect(page.locator(".problem").nth(1)).to_contain_text("no worker is known")
        assert await page.evaluate(OUTSIDE) == []


# ---- Keys, and what is served to those who have none ----


async def test_the_page_asks_for_a_key_and_shows_nothing_before(
    browser: Browser, tmp_path: pathlib.Path
) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    secret = keys.add("alice")
    options = GatewayOptions(keys=keys, status_seconds=0.1)
    async with (
        asyncio.timeout(END),
        fake_gateway((4,), options=options, api_key=secret) as gateway,
        opened(browser, gateway.url, width=320) as page,
    ):
        key = page.get_by_label("Key")
        await expect(key).to_be_focused()
        await expect(page.locator("#page")).to_be_hidden()
        await expect(page.locator("#key-failure")).to_be_hidden()
        assert "127.0.0.1:" not in (await page.locator("body").inner_text())
        await check_accessible(page)
        assert await faint(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= 320
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-failure")).to_contain_text("API key")
        await key.fill(secret)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="fake", exact=True)).to_be_visible()
        await page.get_by_label("Message").fill("Hello")
        await page.get_by_label("Message").press("Enter")
        await expect(page.locator(".turn.assistant")).to_contain_text(re.compile(r"\S{9}"))
        # The key is for this tab, and goes when it is taken away.
        assert await page.evaluate("localStorage.length") == 0
        assert secret not in page.url
        keys.remove("alice")
        await expect(page.locator("#page")).to_be_hidden()
        await expect(key).to_be_visible()


async def test_what_everybody_gets_holds_nothing_and_may_do_nothing(mesh: PageMesh) -> None:
    async with asyncio.timeout(END), httpx.AsyncClient(base_url=mesh.url, timeout=END) as http:
        start = await http.get("/")
        assert start.status_code == 200
        parts = ["/", *re.findall(r'(?:href|src)="(/[^"]+)"', start.text)]
        assert len(parts) > 3
        for path in parts:
            answer = await http.get(path)
            assert answer.status_code == 200, path
            for name in (MODEL, "attic-server", "127.0.0.1"):
                assert f'"{name}"' not in answer.text
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html", "/page/"):
            assert (await http.get(path)).status_code == 404
        assert not re.search(r"<style|style=|<script>|onclick|http:|https:|//", start.text)
