"""The page opened in a browser, and what it did there."""

import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import Browser, Page

from crossdraft.client import Kind, Token
from crossdraft.rpc.generation import Committed, OutputEnded
from crossdraft.rpc.server import Listening
from crossdraft.serving.backend import OutputRequest, TraceSpans
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.trace.timeline import Span, What
from tests.serving.fakes import FakeBackend

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"needs a browser: there is no {' or '.join(BROWSERS)} (Debian: apt-get install chromium)"
WRITTEN = (("def", Kind.ACCEPTED), (" <b>n</b>", Kind.CORRECTED), (" é", Kind.BONUS), ("\n", Kind.ACCEPTED))
TOKENS = tuple(Token(place, text, text.encode(), kind, None) for place, (text, kind) in enumerate(WRITTEN))
TEXT = "".join(text for text, _ in WRITTEN)
SECONDS = 60.0  # that a browser may take for anything; it is never waited for longer than it takes


def browser_here() -> str | None:
    """The path of a browser, if this machine has one."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def spans_before(place: int) -> tuple[Span, ...]:
    """A round of the pipeline for each token."""
    begin = place / 100
    return (
        Span("drafter", begin, begin + 0.002, What.DRAFT, "draft, 3 draft tokens", place, 3),
        Span("drafter", begin + 0.002, begin + 0.003, What.RECEIVED, f"3 draft tokens of epoch {place}", place),
        Span("target", begin + 0.004, begin + 0.008, What.PASS, "pass, 3 nodes", place, 3),
        Span("verification", begin + 0.009, begin + 0.009, What.REFUSED, "refused", place),
        Span("output", begin + 0.009, begin + 0.009, What.ACCEPTED, "x", place),
    )


class TracedBackend(FakeBackend):
    """The same, and what a session would have done."""

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Committed | TraceSpans | OutputEnded, None]:
        place = 0
        async for item in super().stream(request):
            if request.trace and request.drafter != "":
                yield TraceSpans(spans_before(place))
            place += 1
            yield item


@dataclass
class Visit:
    """A page that is open, and what came of it."""

    page: Page
    outputs: FakeBackend
    address: str
    asked: list[str] = field(default_factory=list)  # addresses of all requests
    faults: list[str] = field(default_factory=list)  # what the browser complained of
    policies: dict[str, str] = field(default_factory=dict)  # by address

    async def begin(self, outputs: FakeBackend) -> None:
        """Loads the page, over a backend in the state of this one."""
        vars(self.outputs).update(vars(outputs))
        for seen in (self.asked, self.faults, self.policies):
            seen.clear()
        await self.page.goto(self.address)

    async def fill(self, **fields: str) -> None:
        """Types into fields, by their labels."""
        for label, text in fields.items():
            await self.page.get_by_label(label.replace("_", " "), exact=True).fill(text)

    async def press(self, button: str) -> None:
        """Clicks the button of this name."""
        await self.page.get_by_role("button", name=button, exact=True).click()

    async def ask(self, prompt: str = "def f(n):") -> None:
        """Begins an output."""
        await self.page.locator("#prompt").fill(prompt)
        await self.press("Generate")

    async def generate(self, prompt: str = "def f(n):") -> None:
        """A whole output."""
        await self.ask(prompt)
        await self.page.get_by_text("a second.").wait_for()

    async def text_of(self, place: str) -> str:
        """What an element shows."""
        return await self.page.locator(place).inner_text()


@asynccontextmanager
async def visiting(browser: Browser, outputs: FakeBackend, options: HttpOptions | None = None) -> AsyncIterator[Visit]:
    """The page of a server over these outputs."""
    async with HttpServer(make_app(outputs, options), Listening(grace_seconds=1)) as server:
        address = f"http://{server.address}/"
        context = await browser.new_context()
        context.set_default_timeout(SECONDS * 1000)
        visit = Visit(await context.new_page(), outputs, address)
        visit.page.on("request", lambda request: visit.asked.append(request.url))
        visit.page.on("console", lambda message: visit.faults.append(message.text))
        visit.page.on("pageerror", lambda error: visit.faults.append(str(error)))
        visit.page.on(
            "response",
            lambda reply: visit.policies.update({reply.url: reply.headers.get("content-security-policy", "")}),
        )
        try:
            await visit.begin(outputs)
            yield visit
        finally:
            await context.close()
