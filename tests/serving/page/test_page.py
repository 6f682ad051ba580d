"""What people see and do at `/`, in a real browser."""

import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from crossdraft.client import Kind, Overlap, Reason, RequestError, Token
from crossdraft.rpc.errors import Overloaded
from crossdraft.rpc.generation import OutputEnded
from crossdraft.rpc.server import Listening
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.serving.limits import Keys
from crossdraft.trace.timeline import Span, What
from crossdraft.types.request import Chat, Message
from tests.serving.fakes import TOY, FakeBackend, figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"needs a browser: there is no {' or '.join(BROWSERS)} (Debian: apt-get install chromium)"
WRITTEN = (("def", Kind.ACCEPTED), (" <b>n</b>", Kind.CORRECTED), (" é", Kind.BONUS), ("\n", Kind.ACCEPTED))
TOKENS = tuple(Token(place, text, text.encode(), kind, None) for place, (text, kind) in enumerate(WRITTEN))
TEXT = "".join(text for text, _ in WRITTEN)
SECONDS = 60.0  # that a browser may take for anything; it is never waited for longer than it takes


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


def traced(tokens: Sequence[Token] = TOKENS, **given: Any) -> FakeBackend:
    """A backend that tells what a session would have done."""
    return FakeBackend(tokens, spans=spans_before, **given)


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

    async def press(self, button: str) -> None:
        """Clicks the button of this name."""
        await self.page.get_by_role("button", name=button, exact=True).click()

    async def ask(self, prompt: str = "def f(n):") -> None:
        """Begins an output."""
        await self.page.locator("#prompt").fill(prompt)
        await self.press("Generate")

    async def generate(self, prompt: str = "def f(n):") -> None:
        """A whole output."""
        await self.page.locator("#prompt").fill(prompt)
        await self.go_on()

    async def go_on(self) -> None:
        """The same of what stands there."""
        await self.press("Generate")
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
        policy = "content-security-policy"
        visit.page.on("response", lambda reply: visit.policies.update({reply.url: reply.headers.get(policy, "")}))
        try:
            await visit.begin(outputs)
            yield visit
        finally:
            await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if path is None:
        pytest.skip(MISSING)
    async with async_playwright() as playwright:
        # Its sandbox cannot be had as root, or where user namespaces are off; only our own page is opened.
        started = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Visit]:
    async with visiting(browser, traced()) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def visit(tab: Visit) -> Visit:
    """The page loaded anew, and nothing asked of its backend yet."""
    await tab.begin(traced())
    await tab.page.get_by_role("option", name="small").wait_for(state="attached")
    await tab.page.get_by_role("radio", name="Text", exact=True).check()  # a chat is offered first
    return tab


pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_MS = 30_000.0  # like the page's own waits; 5 s, what `expect` has, may pass on a busy machine
STREAM = 'data: {"text": "é"}\n\n: a comment\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\ndata: [DONE]\n\ndata: cut'
READ = """
async ({ bytes, size }) => {
  const { dataOf } = await import("/page/events.js");
  const body = new ReadableStream({
    start(to) {
      for (let at = 0; at < bytes.length; at += size) to.enqueue(new Uint8Array(bytes.slice(at, at + size)));
      to.close();
    },
  });
  const found = [];
  for await (const data of dataOf(body)) found.push(data);
  return found;
}
"""


async def tokens_of(page: Page, where: str = "#output") -> list[tuple[str, str]]:
    """Text and kind of each token that is shown."""
    found = await page.locator(f"{where} .token").evaluate_all(
        "all => all.map(one => [one.textContent, one.className.replace('token ', '')])"
    )
    return [(text, kind) for text, kind in found]


async def test_a_whole_output(visit: Visit) -> None:
    """Tokens in their colours after the prompt, never HTML; the server's figures; nothing of any other server."""
    page = visit.page
    await visit.generate("<i>x</i>")
    assert await tokens_of(page) == [(text, kind.value) for text, kind in WRITTEN]
    assert await page.locator("#output").text_content() == "<i>x</i>" + TEXT
    assert await page.locator("#output").locator("b, i").count() == 0
    border = "one => [getComputedStyle(one).borderBottomStyle, getComputedStyle(one).borderBottomColor]"
    looks = [await page.locator(f"#output .{kind.value}").first.evaluate(border) for kind in Kind]
    assert len({style for style, _ in looks}) == len({colour for _, colour in looks}) == 3
    figures = [await visit.text_of(f"#{name}") for name in ("tokens-per-pass", "acceptance", "tokens-per-second")]
    assert figures == ["2.00", "67 %", "8.0"]
    assert re.fullmatch(r"\d+ ms", await visit.text_of("#first-token"))
    assert await visit.text_of("#status") == "4 tokens, 2.00 a pass, 8 a second."
    assert visit.asked
    assert all(address.startswith(visit.address) for address in visit.asked)
    assert visit.faults == []
    policy = visit.policies[visit.address]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_figures_are_counted_while_tokens_arrive_and_stop_releases_the_output(visit: Visit) -> None:
    visit.outputs.waits_after = 2
    await visit.ask()
    await visit.page.locator("#output .corrected").wait_for()
    assert await visit.text_of("#tokens-per-pass") == "1.00"
    assert await visit.text_of("#acceptance") == "50 %"
    await visit.press("Stop")
    await visit.outputs.wait_running(0)
    await visit.page.get_by_text("Stopped.").wait_for()
    assert len(await tokens_of(visit.page)) == 2  # what arrived stays
    visit.outputs.waits_after = None
    await visit.generate()  # and another can be made


async def test_what_is_chosen_is_what_is_ordered(visit: Visit) -> None:
    page = visit.page
    number = page.get_by_label("K", exact=True)
    assert await number.is_disabled()  # where it has no effect
    await page.get_by_label("Drafter", exact=True).select_option("small")
    await page.get_by_label("Method").select_option("seeded")
    await page.get_by_label("Overlap").select_option("off")
    for label, text in {"K": "7", "Temperature": "0.5", "Seed": "11", "Max tokens": "20"}.items():
        await page.get_by_label(label, exact=True).fill(text)
    await visit.generate("class Stack:\n")
    (order,) = visit.outputs.requests
    asked = order.generation
    assert (order.model, order.drafter, order.trace) == ("toy", "small", True)
    assert (asked.prompt, asked.method) == ("class Stack:\n", "seeded")
    assert (asked.num_speculative_tokens, asked.overlap) == (7, Overlap.OFF)
    assert (asked.options.temperature, asked.seed, asked.max_tokens) == (0.5, 11, 20)


async def test_a_chat_goes_on_with_what_was_said(visit: Visit) -> None:
    await visit.page.get_by_role("radio", name="Chat", exact=True).check()
    for message in ("Hello", "And?"):
        await visit.page.get_by_label("Message", exact=True).fill(message)
        await visit.press("Generate")
        await expect(visit.page.locator("#prompt")).to_have_value("", timeout=WAIT_MS)
    first, second = (order.generation.prompt for order in visit.outputs.requests)
    assert first == Chat((Message("user", "Hello"),))
    assert second == Chat((Message("user", "Hello"), Message("assistant", TEXT), Message("user", "And?")))
    said = f"user: Hello\n\nassistant: {TEXT}\n\nuser: And?\n\nassistant: {TEXT}"
    assert await visit.page.locator("#output").text_content() == said
    await visit.press("new chat")
    await visit.page.get_by_role("radio", name="Text", exact=True).check()
    await visit.generate("x")
    assert visit.outputs.requests[-1].generation.prompt == "x"


async def test_a_call_of_a_tool_is_shown_and_its_result_goes_back(browser: Browser) -> None:
    called = '{"city": "Oslo"}'
    text = f'<tool_call>\n{{"name": "weather", "arguments": {called}}}\n</tool_call>'
    tokens = [Token(1, one, one.encode(), Kind.ACCEPTED, None) for one in text]
    outputs = traced(tokens, served=(replace(TOY, chats=True, tool_format="hermes"),))
    async with visiting(browser, outputs) as visit:
        await visit.press("call a tool")
        await visit.page.locator("#overlap").select_option("off")  # another setting leaves the example as it is
        await expect(visit.page.locator("#extra")).to_contain_text('"name":"calculator"', timeout=WAIT_MS)
        await visit.go_on()
        shown = await visit.page.locator("#output .token").all_text_contents()
        assert (shown[0], "".join(shown)) == ("→ weather {", f"→ weather {called}")
        outputs.tokens = TOKENS
        await visit.page.get_by_label("Result of weather").fill("Rain")
        await visit.press("Generate")
        said = re.compile(r"assistant: → weather \{.*tool: Rain.*def", re.DOTALL)
        await expect(visit.page.locator("#output")).to_have_text(said, timeout=WAIT_MS)
        first, second = (order.generation.prompt for order in outputs.requests)
        assert [one["function"]["name"] for one in first.settings["tools"]] == ["weather", "calculator"]
        _, call, result = second.messages
        (made,) = call.more["tool_calls"]
        assert (made["function"], result.content) == ({"name": "weather", "arguments": json.loads(called)}, "Rain")
        assert result.more == {"tool_call_id": made["id"]}
        await visit.press("JSON by a schema")
        assert await visit.page.get_by_label("Message", exact=True).input_value()
        await visit.go_on()
        assert outputs.requests[-1].generation.options.grammar.kind == "json"
        assert visit.faults == []


async def test_a_chat_comes_first_where_the_model_has_a_template_and_examples_fit(visit: Visit) -> None:
    page = visit.page
    assert await page.get_by_role("button", name="write a class", exact=True).is_hidden()
    await page.reload()
    await page.get_by_label("Message", exact=True).wait_for()
    assert await page.get_by_role("radio", name="Chat", exact=True).is_checked()
    assert await page.get_by_role("button", name="class Point", exact=True).is_hidden()
    await visit.press("write a class")
    await visit.go_on()
    asked = visit.outputs.requests[0].generation.prompt
    assert asked == Chat((Message("user", "Write a Python class for a stack, with a docstring for each method."),))


async def test_a_model_without_a_chat_template_has_no_chat(browser: Browser) -> None:
    async with visiting(browser, traced(served=(replace(TOY, chats=False),))) as visit:
        await visit.page.get_by_role("option", name="small").wait_for(state="attached")
        assert await visit.page.get_by_role("radio", name="Chat", exact=True).is_hidden()
        assert await visit.page.get_by_role("button", name="class Point", exact=True).is_visible()


async def test_what_services_cannot_do_now_is_shown_and_after_each_output_anew(browser: Browser) -> None:
    lost = replace(TOY, detail=("targets: 1 of 2 lost; tried again", "drafter small: lost; tried again"))
    async with visiting(browser, traced(served=(lost,))) as visit:
        shown = visit.page.locator("#detail")
        await expect(shown).to_have_text("\n".join(lost.detail), timeout=WAIT_MS)
        visit.outputs.served = (TOY,)
        await visit.generate()
        await expect(shown).to_be_hidden(timeout=WAIT_MS)


async def test_an_empty_prompt_is_not_sent_examples_fill_it_and_ctrl_enter_generates(visit: Visit) -> None:
    await visit.press("Generate")
    assert await visit.page.locator("#prompt").evaluate("one => one.matches(':user-invalid')")
    assert visit.outputs.requests == []
    await visit.press("class Point")
    await visit.page.keyboard.press("Control+Enter")
    await visit.page.get_by_text("a second.").wait_for()
    assert visit.outputs.requests[0].generation.prompt == "class Point:\n    def __init__(self, x, y):\n"


async def test_what_goes_wrong_is_said_in_the_servers_words(visit: Visit) -> None:
    alert, said = visit.page.get_by_role("alert"), visit.page.get_by_text
    visit.outputs.fault = RequestError("method 'tli' needs a drafter that shares tokens")
    await visit.ask()
    await said("method 'tli' needs a drafter that shares tokens").wait_for()
    visit.outputs.fault = Overloaded("64 outputs are being made", 2.5)
    await visit.ask()
    await said("64 outputs are being made (try again in 3 s)").wait_for()
    visit.outputs.fault, visit.outputs.fault_after = RequestError("the target is gone"), 2
    await visit.ask()
    await said("the target is gone").wait_for()
    assert len(await tokens_of(visit.page)) == 2  # what arrived stays
    assert await visit.page.get_by_role("button", name="Compare").is_disabled()
    visit.outputs.fault = None
    await visit.generate()
    assert await alert.is_hidden()
    await visit.page.context.set_offline(True)
    await visit.ask()
    await said("The server cannot be reached").wait_for()
    await visit.page.context.set_offline(False)


async def test_a_field_that_the_server_refuses_is_marked(visit: Visit) -> None:
    await visit.page.get_by_label("Overlap").select_option("on")
    await visit.page.locator("#num-speculative-tokens").evaluate("one => { one.max = 1000; one.value = 999; }")
    await visit.ask()
    await visit.page.get_by_role("alert").wait_for()
    assert await visit.page.locator("#num-speculative-tokens").get_attribute("aria-invalid") == "true"


async def test_a_model_that_comes_later_is_offered_then(browser: Browser) -> None:
    outputs = traced(served=())
    async with visiting(browser, outputs) as visit:
        await visit.page.get_by_text("No model can be served yet").wait_for()
        outputs.served = (TOY,)
        await visit.page.get_by_role("option", name="small").wait_for(state="attached")  # nobody has asked for it
        await expect(visit.page.get_by_role("alert")).to_be_hidden(timeout=WAIT_MS)
        await visit.page.get_by_role("radio", name="Text", exact=True).check()
        await visit.generate()
        assert len(outputs.requests) == 1


async def test_compare_runs_the_same_without_a_drafter(visit: Visit) -> None:
    assert await visit.page.get_by_role("button", name="Compare").is_disabled()
    await visit.generate()
    await visit.press("Compare")
    await visit.page.get_by_text("The texts are the same.").wait_for()
    drafted, plain = visit.outputs.requests
    assert (drafted.drafter, plain.drafter, drafted.generation) == ("ngram", "", plain.generation)
    assert await visit.text_of("#speedup") == "1.00 ×"
    assert await tokens_of(visit.page, "#plain-output") == await tokens_of(visit.page)
    verdict = "8 tokens a second with a drafter, 8 without: 1.00 ×. The texts are the same."
    assert await visit.text_of("#verdict") == verdict
    visit.outputs.end = OutputEnded(Reason.STOP, replace(figures(4), draft_tokens=0, drafted_at=()))
    await visit.generate()
    await visit.press("Compare")
    await visit.page.get_by_text("8 tokens a second with a drafter that drafted nothing, 8 without").wait_for()
    await visit.page.get_by_label("Drafter", exact=True).select_option("none")
    await visit.generate()
    assert await visit.page.get_by_role("button", name="Compare").is_disabled()  # with what it is already


async def test_lanes_are_drawn_from_the_trace(visit: Visit) -> None:
    await visit.generate()
    lanes, rounds = visit.page.locator("#lanes"), len(TOKENS) + 1  # one comes with the end
    names = await visit.page.locator("#lane-names text").all_text_contents()
    assert names == ["epoch", "drafter", "wire", "verification", "wire", "target", "tokens out", "ms"]
    assert await lanes.locator("rect.work").count() == 2 * rounds
    assert await lanes.locator("line.way").count() == await lanes.locator("rect.kind").count() == rounds
    label = f"Work of drafter and target over 49 ms: {rounds} passes, {rounds} rejections"
    assert await lanes.get_attribute("aria-label") == label
    hidden = "one => one.scrollWidth - one.clientWidth"
    visit.outputs.tokens = TOKENS * 40
    await visit.generate()  # all of it is visible until somebody zooms
    assert await visit.page.locator("#lanes-view").evaluate(hidden) <= 0
    await visit.press("zoom in")
    assert await visit.page.locator("#lanes-view").evaluate(hidden) > 0
    await visit.press("everything")
    assert await visit.page.locator("#lanes-view").evaluate(hidden) <= 0


async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser) -> None:
    outputs = traced()
    async with visiting(browser, outputs, HttpOptions(keys=Keys.of({"tester": "open-sesame-123456"}))) as visit:
        await visit.page.get_by_role("alert").wait_for()
        await visit.page.get_by_label("API key").fill("open-sesame-123456")
        await visit.page.get_by_label("API key").press("Tab")
        await visit.page.get_by_role("option", name="small").wait_for(state="attached")
        await visit.generate()
        assert len(outputs.requests) == 1
        await visit.page.reload()
        await visit.page.get_by_role("option", name="small").wait_for(state="attached")
        stored = await visit.page.evaluate("() => [localStorage.length, document.cookie]")
        assert stored == [0, ""]


async def test_every_field_has_a_name_and_the_keyboard_reaches_all(visit: Visit) -> None:
    nameless = await visit.page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length).length"
    )
    assert nameless == 0
    await visit.page.get_by_label("Overlap").select_option("on")
    await visit.page.locator("#prompt").focus()
    reached = set()
    for _ in range(16):
        await visit.page.keyboard.press("Tab")
        reached.add(await visit.page.evaluate("() => document.activeElement.id"))
    fields = "model drafter method overlap num-speculative-tokens temperature seed max-tokens generate"
    assert set(fields.split()) <= reached


async def test_cuts_change_nothing_and_what_has_no_end_is_no_event(visit: Visit) -> None:
    """Of server-sent events, wherever the network cuts them."""
    for size in (1, 2, 3, 5, 1000):
        read = await visit.page.evaluate(READ, {"bytes": list(STREAM.encode()), "size": size})
        assert read == ['{"text": "é"}', "one\ntwo", "[DONE]"]
