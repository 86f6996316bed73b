"""The status page in Chromium: what people see of a fleet, on a phone and on a desk."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from outrider_router.api.status_page import status_router
from outrider_router.api.status_page.figures import MIN_INTERVAL_S
from outrider_router.requests.service import RouterService

from outrider.wire.messages import SpecStats
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, text_request
from tests.waiting import until
from tools.fetch_browser import find_browser

if TYPE_CHECKING:
    from playwright.async_api import Page

BROWSER = find_browser()
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no Chromium on the PATH: `make browser` installs one as root"
)

HOSTILE = '<img src=x onerror="document.title=1">'
PATIENCE_MS = 30_000
PHONE, DESK = {"width": 375, "height": 740}, {"width": 1400, "height": 900}
NARROW, TABLET = {"width": 320, "height": 640}, {"width": 820, "height": 1180}


@dataclass
class Site:
    """A router's page, being served."""

    service: RouterService
    verifier: FakeVerifier
    url: str
    problems: list[str] = field(default_factory=list)
    """What the browser complained of."""
    foreign: list[str] = field(default_factory=list)
    """Addresses elsewhere that it asked for."""


@asynccontextmanager
async def serving(directory: Path, *, key: str = "", away: bool = True) -> AsyncGenerator[Site]:
    """A router with a verifier, and with another one that is unreachable, on a free port."""
    fleet = {"v": FakeVerifier()}
    if away:
        fleet["away"] = FakeVerifier()
        fleet["away"].lost.set()
    fleet["v"].change_info(
        kv_free_blocks=64,
        round_ms_p50=4.5,
        forward_ms_p50=3.5,
        overhead_ms_p50=0.5,
        stats=SpecStats(rounds=8, emitted=20, proposed=16, accepted=12),
    )
    drafter = FakeDrafter(fleet, name=HOSTILE)
    app = FastAPI()

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        asked = request.headers.get("authorization", "")
        if key and request.url.path == "/status.json" and asked != f"Bearer {key}":
            return Response(status_code=401)
        return await answer(request)

    async with running_router(directory, fleet, {"d": drafter}) as service:
        app.include_router(status_router(service))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started, timeout_s=30.0)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield Site(service, fleet["v"], f"http://127.0.0.1:{port}/")
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def browsing(site: Site, **options: object) -> AsyncGenerator[Page]:
    """A page in Chromium that shows the site."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: site.problems.append(str(error)))
        page.on(
            "console",
            lambda line: site.problems.append(line.text) if line.type == "error" else None,
        )
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith((site.url, "data:"))
                else site.foreign.append(asked.url)
            ),
        )
        await page.goto(site.url)
        yield page
        await browser.close()


async def says(page: Page, selector: str, text: str) -> None:
    """Wait until an element shows a text."""
    await page.locator(selector, has_text=text).first.wait_for()


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        (PHONE, "light"),
        (PHONE, "dark"),
        (DESK, "light"),
        (DESK, "dark"),
        (NARROW, "light"),
        (TABLET, "dark"),
    ],
    ids=["phone-light", "phone-dark", "desk-light", "desk-dark", "narrow", "tablet"],
)
async def test_the_fleet_fits_every_screen(
    tmp_path: Path, viewport: dict[str, int], scheme: str
) -> None:
    async with (
        serving(tmp_path) as site,
        browsing(site, viewport=viewport, color_scheme=scheme) as page,
    ):
        await says(page, "#connection", "live")
        await says(page, "#verifiers article", "● serving")
        await says(page, "#verifiers article", "✕ away")
        await says(page, "#verifiers article", "192 / 256")
        await says(page, "#verifiers article", "round 4.5 ms")
        await says(page, "#drafters article", "eagle3, ngram at d")
        await says(page, "#drafters td", "in use")
        wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "it scrolls sideways"
        assert (site.problems, site.foreign) == ([], [])


async def test_what_peers_call_themselves_is_shown_and_does_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing(site, viewport=DESK) as page:
        await says(page, "#drafters h3", HOSTILE)
        assert await page.title() == "Outrider"
        assert await page.locator("main img").count() == 0
        assert site.problems == []


async def test_what_is_wrong_comes_first_with_what_to_do(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing(site, viewport=PHONE) as page:
        await says(page, "#problems li", "Verifier away has not answered yet")
        await says(page, "#problems .warning .severity", "Warning")
        await says(page, "#problems .advice", "What to do:")
        await says(page, "#verdict", "One thing needs attention.")
        assert await page.locator("main section").first.locator("#problems").count() == 1
        site.verifier.change_info(kv_free_blocks=1, waiting_sessions=5)
        await says(page, "#problems li", "v0 has no memory for more requests")
        await says(page, "#verdict", "2 things need attention.")


async def test_it_says_when_nothing_is_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path, away=False) as site, browsing(site, viewport=DESK) as page:
        await says(page, "#verdict", "Nothing is wrong.")
        assert await page.locator("#problems li").count() == 0
        site.verifier.lost.set()
        await says(page, "#problems .critical", "No verifier is ready")


async def test_speculation_is_told_in_words(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing(site, viewport=DESK) as page:
        await says(page, "#speculation li", "No tokens were generated")
        planner = "eagle3 chain of 4, greedy, T 0.0: chain of 4 (faster, 1.90x of plain)"
        site.verifier.change_info(planner=planner)
        await says(page, "#verifiers .sentences", "tokens come 1.9 times as fast")
        assert "eagle3 chain" not in await page.locator("#verifiers").inner_text()
        site.verifier.change_info(planner=planner.replace("(", HOSTILE))
        await page.locator("#verifiers .sentences", has_text="1.9 times").wait_for(state="detached")
        assert await page.locator("main img").count() == 0


async def test_the_history_of_the_router_is_there_when_the_page_opens(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for _ in range(3):
            await collect(site.service, text_request(max_tokens=20))
        await asyncio.sleep(MIN_INTERVAL_S)
        async with browsing(site, viewport=DESK, reduced_motion="reduce") as page:
            median = page.locator('#tiles .tile:has-text("Time to first token")')
            await median.locator(".legend", has_text="95th percentile").wait_for()
            await median.locator("path.first").wait_for(state="attached")
            await median.locator("path.second").wait_for(state="attached")
            # One value alone is a short stroke.
            assert " L " in (await median.locator("path.first").get_attribute("d") or "")
            assert await page.evaluate("document.getAnimations().length") == 0


async def test_figures_follow_the_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing(site, viewport=DESK) as page:
        rounds = '#tiles .tile:has-text("Tokens a round") .value'
        await says(page, rounds, "\N{EN DASH}")
        for _ in range(3):
            await collect(site.service, text_request(max_tokens=20))
        await says(page, rounds, "1.00")
        label = page.locator('#tiles [aria-label^="Tokens lately, now"]')
        await label.wait_for()
        assert await page.locator("#tiles .spark path").count() > 0


async def test_it_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing(site, viewport=DESK) as page:
        await says(page, "#connection", "live")
        assert await page.locator("html[lang=en]").count() == 1
        for landmark in ("header", "main", "footer"):
            assert await page.locator(landmark).count() == 1
        levels = await page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))"
        )
        assert levels[0] == 1 and all(b <= a + 1 for a, b in itertools.pairwise(levels))
        nameless = "[...document.querySelectorAll('main svg')].filter(s => !s.ariaLabel && "
        assert await page.evaluate(nameless + "!s.closest('[aria-hidden=true]')).length") == 0
        assert await page.locator("th:not([scope])").count() == 0
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"


async def test_it_says_when_the_router_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        site.verifier.change_info(model_name="fake")
        async with browsing(site, viewport=PHONE) as page:
            await says(page, "#connection", "live")
            await page.route("**/status.json*", lambda route: route.abort())
            await says(page, "#connection", "does not answer")
            await page.unroute("**/status.json*")
            await says(page, "#connection", "live")


async def test_it_asks_for_a_token_where_the_router_wants_one(tmp_path: Path) -> None:
    async with serving(tmp_path, key="k1") as site, browsing(site, viewport=PHONE) as page:
        await page.get_by_label("bearer token").fill("k1")
        await page.get_by_role("button", name="Show").click()
        await says(page, "#verifiers article", "● serving")
        assert not await page.locator("#login").is_visible()
