"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence

from crossdraft.pipeline import Token
from crossdraft.serving.http.answers import ChatLogprobs, ChatToken, CompletionLogprobs, LikelyToken

NEVER = -9999.0  # OpenAI's for what has no probability worth a number; JSON has no infinity


def shown(token: int, raw: bytes) -> str:
    """A token as text, unlike any other's: its characters, else its bytes in OpenAI's spelling, else its id."""
    if not raw:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def of_chat(tokens: Sequence[Token]) -> ChatLogprobs:
    """Of the tokens of a message, or of a piece of it."""
    return ChatLogprobs(content=[_chat_token(token) for token in tokens])


def _chat_token(token: Token) -> ChatToken:
    likely = [_likely(other, raw, value) for other, raw, value in token.top]
    own = _likely(token.id, token.raw, token.log_probability)
    return ChatToken(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=likely)


def _likely(token: int, raw: bytes, value: float | None) -> LikelyToken:
    return LikelyToken(token=shown(token, raw), logprob=_finite(value), bytes=list(raw) or None)


def of_completion(tokens: Sequence[Token], offset: int) -> CompletionLogprobs:
    """Of tokens of a completion; `offset` characters of its text come before them."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        tokens=[shown(token.id, token.raw) for token in tokens],
        token_logprobs=[_finite(token.log_probability) for token in tokens],
        top_logprobs=[{shown(other, raw): _finite(value) for other, raw, value in token.top} for token in tokens],
        text_offset=offsets,
    )


def _finite(value: float | None) -> float:
    return NEVER if value is None else max(NEVER, value)
