"""One browser and one server for all tests of the page."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.serving.page.browsing import MISSING, TOKENS, TracedBackend, Visit, browser_here, visiting


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = browser_here()
    if path is None:
        pytest.skip(MISSING)
    async with async_playwright() as playwright:
        # Its sandbox cannot be had as root, or where user namespaces are off; only our own page is opened.
        started = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Visit]:
    async with visiting(browser, TracedBackend(TOKENS)) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def visit(tab: Visit) -> Visit:
    """The page loaded anew, and nothing asked of its backend yet."""
    await tab.begin(TracedBackend(TOKENS))
    await tab.page.get_by_role("option", name="small").wait_for(state="attached")
    await tab.page.get_by_role("radio", name="Text", exact=True).check()  # a chat is offered first
    return tab
