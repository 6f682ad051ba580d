"""A chat as a prompt, and how it is written for a model."""

from dataclasses import dataclass

from crossdraft.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Message:
    """What one side has said."""

    role: str  # system, user, assistant, or what else the model's template knows
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation that the model is to go on with."""

    messages: tuple[Message, ...]

    @property
    def fault(self) -> str:
        """What is wrong with it, whatever the model; empty if nothing is."""
        if not isinstance(self.messages, tuple) or not all(isinstance(one, Message) for one in self.messages):
            return f"the messages of a chat must be a tuple of Message, got {self.messages!r}"
        if not self.messages:
            return "the chat has no messages; give at least one"
        for place, message in enumerate(self.messages):
            if not (isinstance(message.role, str) and message.role and isinstance(message.content, str)):
                return f"message {place} of the chat needs a role and a content, both texts"
            if not writable(message.role + message.content):
                return f"message {place} of the chat has half of a surrogate pair, which is no character"
        return ""


def writable(text: str) -> bool:
    """Whether UTF-8 can write it: JSON can bring halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def rendered(chat: Chat, template: ChatTemplate) -> str:
    """The chat as a model's own template writes it, up to where the answer begins.

    Raises:
        ChatTemplateError: the template is damaged, or refuses the chat.
    """
    return template.render([{"role": one.role, "content": one.content} for one in chat.messages])


def plain(chat: Chat) -> str:
    """The chat for a model without a template: paragraphs that begin with who speaks, the last one left open.

    User: How are you?

    Assistant:
    """
    paragraphs = [f"{one.role.capitalize()}: {one.content}" for one in chat.messages]
    return "\n\n".join([*paragraphs, "Assistant:"])
