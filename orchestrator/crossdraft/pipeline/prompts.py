"""What target and drafter are told of a request's prompt."""

from dataclasses import dataclass

from crossdraft.pipeline.chat import Chat, plain, rendered
from crossdraft.pipeline.request import Prompt, RequestError
from crossdraft.text.chat_template import ChatTemplateError
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.verification.exchange import Description


@dataclass(frozen=True)
class Prompts:
    """One prompt for both models."""

    target: tuple[int, ...]  # its ids
    drafter: Letters
    templated: bool = False  # the drafter's is written with its own chat template


def prompts_of(prompt: Prompt, target: Description, tokenization: Tokenization, drafter: Description | None) -> Prompts:
    """The prompt as each model reads it.

    Args:
        prompt: text, ids of the target, or a chat.
        target: what the target said of itself.
        tokenization: the target's.
        drafter: what the drafter said of itself; None: there is none.

    Raises:
        RequestError: an id that the target has not, or a chat that its template refuses.
    """
    match prompt:
        case str():
            return Prompts(tokenization.encode_prompt(prompt), _letters(prompt))
        case Chat():
            ids = _chat_ids(prompt, target, tokenization)
            return Prompts(ids, *_chat_letters(prompt, drafter))
        case _:
            wrong = [token for token in prompt if token >= tokenization.vocabulary.size]
            if wrong:
                last = tokenization.vocabulary.size - 1
                raise RequestError(f"the prompt has the id {wrong[0]}; the target's ids are 0 to {last}", "prompt")
            return Prompts(prompt, tokenization.prompt_letters(prompt))


def _letters(text: str) -> Letters:
    return from_bytes(text.encode())


def _chat_ids(chat: Chat, target: Description, tokenization: Tokenization) -> tuple[int, ...]:
    if target.chat_template is None:
        return tokenization.encode_prompt(plain(chat))
    try:
        return tokenization.encode_rendered(rendered(chat, target.chat_template))
    except ChatTemplateError as error:
        raise RequestError(f"the chat template of {target.model!r} cannot write this chat: {error}") from error


def _chat_letters(chat: Chat, drafter: Description | None) -> tuple[Letters, bool]:
    """A drafter whose template cannot write it gets it plainly, as one without a template: it only guesses."""
    if drafter is not None and drafter.chat_template is not None:
        try:
            return _letters(rendered(chat, drafter.chat_template)), True
        except ChatTemplateError:
            pass
    return _letters(plain(chat)), False
