"""Server-sent events are read whole, wherever the network cuts them."""

import pytest
from playwright.async_api import Browser

from crossdraft.serving.http import make_app
from tests.serving.fakes import FakeBackend
from tests.serving.page.browsing import SECONDS, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
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


async def test_cuts_change_nothing_and_what_has_no_end_is_no_event(browser: Browser) -> None:
    async with served(make_app(FakeBackend())) as address:
        page = await browser.new_page()
        page.set_default_timeout(SECONDS * 1000)
        await page.goto(address)
        for size in (1, 2, 3, 5, 1000):
            read = await page.evaluate(READ, {"bytes": list(STREAM.encode()), "size": size})
            assert read == ['{"text": "é"}', "one\ntwo", "[DONE]"]
        await page.close()
