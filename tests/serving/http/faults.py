"""The shape of an error, and the paths that give one."""

from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PARTS = {"message", "type", "param", "code"}


def fault(response: Any) -> dict[str, Any]:
    """The error of a reply, which has OpenAI's shape."""
    (name, error), *others = response.json().items()
    assert (name, set(error), others) == ("error", PARTS, [])
    assert error["message"]
    return dict(error)
