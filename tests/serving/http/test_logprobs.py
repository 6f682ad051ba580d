"""Log-probabilities in OpenAI's shapes."""

import pytest

from crossdraft.client import Kind, Token
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import MESSAGES, Front

TOKENS = (
    Token(5, "He", b"He", Kind.ACCEPTED, -0.5, ((5, b"He", -0.5), (6, b"Hi", -1.0))),
    Token(9, "", b"\xc3", Kind.CORRECTED, -1.5, ((7, b"\xa9", -0.25), (9, b"\xc3", -1.5))),
    Token(7, "é", b"\xa9", Kind.BONUS, -0.125, ((7, b"\xa9", -0.125), (0, b"", float("-inf")))),
    Token(2, "", b"", Kind.BONUS, -1.0, ((2, b"", -1.0), (3, b"", -2.0)), ((2, "</s>"), (3, "<unk>"))),
)


@pytest.fixture(params=[1, 2, 4])
def outputs(request: pytest.FixtureRequest) -> FakeBackend:
    """So many tokens come together."""
    return FakeBackend(TOKENS, together=request.param)


@pytest.mark.parametrize("streamed", [False, True])
async def test_of_a_completion(served: Front, outputs: FakeBackend, streamed: bool) -> None:
    create = served.openai.completions.create
    if streamed:
        chunks = [chunk async for chunk in await create(model="toy", prompt="Say", logprobs=2, stream=True)]
        found = [chunk.choices[0].logprobs for chunk in chunks]
        assert found.pop() is None  # of the end
    else:
        found = [(await create(model="toy", prompt="Say", logprobs=2)).choices[0].logprobs]
    together: dict[str, list[object]] = {}
    for one in found:
        for name, values in one.to_dict().items():
            assert isinstance(values, list)
            together.setdefault(name, []).extend(values)
    assert together == {
        "tokens": ["He", r"bytes:\xc3", r"bytes:\xa9", "</s>"],
        "token_logprobs": [-0.5, -1.5, -0.125, -1.0],
        "top_logprobs": [
            {"He": -0.5, "Hi": -1.0},
            {r"bytes:\xa9": -0.25, r"bytes:\xc3": -1.5},
            {r"bytes:\xa9": -0.125, "token_id:0": -9999.0},
            {"</s>": -1.0, "<unk>": -2.0},
        ],
        "text_offset": [0, 2, 2, 3],
    }
    assert outputs.requests[0].generation.logprobs == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_of_a_chat(served: Front, outputs: FakeBackend, streamed: bool) -> None:
    create = served.openai.chat.completions.create
    if streamed:
        stream = await create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True)
        found = [chunk.choices[0].logprobs async for chunk in stream]
        assert found.pop() is None
    else:
        done = await create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2)
        found = [done.choices[0].logprobs]
    tokens = [token for one in found if one is not None for token in one.content or ()]
    assert [(token.token, token.logprob, token.bytes) for token in tokens] == [
        ("He", -0.5, [72, 101]),
        (r"bytes:\xc3", -1.5, [0xC3]),
        (r"bytes:\xa9", -0.125, [0xA9]),
        ("</s>", -1.0, None),
    ]
    likely = tokens[2].top_logprobs
    assert [(one.token, one.logprob, one.bytes) for one in likely] == [
        (r"bytes:\xa9", -0.125, [0xA9]),
        ("token_id:0", -9999.0, None),
    ]
    assert outputs.requests[0].generation.logprobs == 2


async def test_without_others(served: Front, outputs: FakeBackend) -> None:
    await served.openai.chat.completions.create(model="toy", messages=MESSAGES, logprobs=True)
    await served.openai.completions.create(model="toy", prompt="Say", logprobs=0)
    await served.openai.completions.create(model="toy", prompt="Say")
    assert [order.generation.logprobs for order in outputs.requests] == [0, 0, None]
