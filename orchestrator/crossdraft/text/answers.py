"""What a model's answer consists of: reasoning, content and calls of tools, in one text in the model's own form.

Forms are data, by the names of vLLM's parsers; one parser reads all of them, while the text comes in, and the grammars
of calls are made from the same data.
"""

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

from crossdraft.text.grammar import Grammar

BLANKS = " \t\r\n"
BETWEEN = BLANKS + ",;]"  # what may stand after calls: they are a list, or written one after the other
ARGUMENTS = ("arguments", "parameters")
MEMBERS = (*ARGUMENTS, "name", "id", "type")  # of a call; what begins with another is content at once
NAMED = "[ARGS]"  # in Mistral's newer form, between the name of a function and its arguments


@dataclass(frozen=True)
class ToolFormat:
    """How a model calls tools: by JSON objects with the name of a function and its arguments.

    A grammar writes letters, and so no mark that is a control symbol of the tokenizer.
    """

    begin: str = ""  # stands before calls; without it an answer that begins like JSON is calls
    end: str = ""  # stands after each call
    spelled: bool = False  # the marks are letters
    listed: bool = True  # several calls are a JSON list, with these marks outside, or else one after the other
    arguments: Literal["arguments", "parameters"] = "arguments"
    hint: str = ""  # in the chat templates of such models; by default `begin`
    bare: bool = False  # calls may also stand without `begin`


# In the order in which templates are looked through.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", spelled=True, listed=False),
    "mistral": ToolFormat("[TOOL_CALLS]"),
    "granite": ToolFormat("<|tool_call|>"),
    "jamba": ToolFormat("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": ToolFormat("functools", spelled=True),
    "llama3_json": ToolFormat(
        "<|python_tag|>", listed=False, arguments="parameters", hint="Environment: ipython", bare=True
    ),
    "json": ToolFormat(bare=True),
}


@dataclass(frozen=True)
class Reasoning:
    """Where an answer's reasoning stands."""

    begin: str
    end: str
    open: bool = False  # an answer begins within it, without `begin`


REASONINGS: Mapping[str, Reasoning] = {
    "deepseek_r1": Reasoning("<think>", "</think>", open=True),
    "qwen3": Reasoning("<think>", "</think>"),
    "glm45": Reasoning("<think>", "</think>"),
    "step3": Reasoning("<think>", "</think>", open=True),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
}


def format_of(template: str) -> str:
    """The tool format that a chat template writes; `json` if it knows none."""
    shown = ((name, tools.hint or tools.begin) for name, tools in TOOL_FORMATS.items())
    return next((name for name, hint in shown if hint and hint in template), "json")


def after(reasoning: Reasoning, prompt: str) -> Reasoning | None:
    """How an answer to a prompt goes on: the prompt may have begun its reasoning, or ended it, as templates do."""
    said = prompt.rstrip()
    if said.endswith(reasoning.end):
        return None
    return replace(reasoning, open=True) if said.endswith(reasoning.begin) else reasoning


@dataclass(frozen=True)
class Function:
    """A tool."""

    name: str
    schema: str  # JSON schema of its arguments, an object


@dataclass(frozen=True)
class AnswerForm:
    """How one answer is written."""

    tools: ToolFormat | None = None  # None: there are none
    reasoning: Reasoning | None = None
    bare: bool = False  # calls come without a mark that is a control symbol, as a grammar writes them
    most: int | None = None  # calls that count; None: all
    must: bool = False  # there is nothing but calls: other text is the beginning of one that was cut

    @property
    def plain(self) -> bool:
        """Whether an answer is nothing but content."""
        return self.tools is None and self.reasoning is None

    @property
    def marks(self) -> tuple[str, ...]:
        """Which may be control symbols, that have no text of their own."""
        tools, reasoning = self.tools, self.reasoning
        found = (tools.begin, tools.end) if tools is not None else ()
        return found if reasoning is None else (*found, reasoning.begin, reasoning.end)

    def grammar(self, functions: Sequence[Function], free: bool, content: Grammar | None = None) -> Grammar | None:
        """What an answer is to be, once its reasoning has ended; None: anything. Raises ValueError.

        `functions`: that it may call, by their schemas; none: content alone counts. `free`: whether there may be
        content as well, or something else than calls. `content`: what that is to be; None: anything.
        """
        tools, rules, ways = self.tools, list[str](), list[str]()
        if tools is not None and functions and (tools.spelled or content is not None or not free):
            rules += _calls(tools, functions, self.most)
            ways.append("open" if free and content is None else "calls")
        if content is not None and (free or not ways):
            if not ways and self.reasoning is None:
                return content
            rules.append(content.rule("content"))
            ways.append("content")
        if not ways:
            return None
        start = f"({' | '.join(ways)})"
        if self.reasoning is not None:
            begin = "" if self.reasoning.open else re.escape(self.reasoning.begin)
            rules.append(f"thinking[suffix={_quoted(self.reasoning.end)}]: /{begin}(?s:.*)/")
            rules.append("reasoned: thinking /[ \\t\\r\\n]{0,8}/")
            start = f"{'reasoned' if self.reasoning.open else 'reasoned?'} {start}"
        return Grammar.ebnf("\n".join([f"start: {start}", *rules]) + "\n")


def _calls(tools: ToolFormat, functions: Sequence[Function], most: int | None) -> list[str]:
    """Rules of `calls`, and of `open`: content with calls in it, where a mark begins them."""
    begin = _quoted(tools.begin) if tools.spelled else ""
    by_schema = defaultdict[str, list[str]](list)
    for function in functions:
        by_schema[function.schema].append(function.name)
    rules, ways = list[str](), list[str]()
    for schema, names in by_schema.items():
        at = functions.index(Function(names[0], schema))
        ways.append(rule := f"function_{at}_{re.sub('[^a-z0-9_]', '_', names[0].lower()[:64])}")
        heads = " | ".join(_quoted(f'{_quoted(name)}, "{tools.arguments}": ') for name in names)
        rules.append(f'{rule}: "{{\\"name\\": " ({heads}) {rule}_arguments "}}"\n{rule}_arguments: %json {schema}')
    rules.append(f"function: {' | '.join(ways)}")
    ended = bool(tools.end) and not tools.listed
    call = f'"\\n" function {_quoted(chr(10) + tools.end)}' if ended else "function"
    between = '", "' if tools.listed else f'"\\n" {begin}' if ended else '"; "'
    called = "call" if most == 1 else f"call ({between} call)*"
    listed = f'"[" {called} "]"'
    rules += [f"call: {call}", f"called: {listed if tools.listed else called}", f"calls: {begin} called"]
    if begin:
        again = "?" if most == 1 else "*"
        rules.append(f"open: (begun called){again} /(?s:.*)/\nbegun[suffix={begin}]: /(?s:.*)/")
    return rules


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class What(StrEnum):
    """A part of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # begins: the name of the function
    ARGUMENTS = "arguments"  # of the latest call: JSON, as the model writes it


class Said(NamedTuple):
    """A piece of a part. Pieces of one part are to be joined."""

    what: What
    text: str
    call: int = 0  # index of the call
    id: str = ""  # of a call that begins: nine letters and digits


Steps = Generator[None, None, str]  # yields when it needs more text
Tries = Generator[None, None, bool]


class Input:
    """The text of an answer as it comes in, and what has been read of it that may be something else."""

    def __init__(self) -> None:
        self.over = False  # nothing more comes
        self.tried: list[str] = []
        self._text, self._at = "", 0  # what has come, and how much of it has been read

    def add(self, text: str) -> None:
        self._text, self._at = self.rest + text, 0

    @property
    def rest(self) -> str:
        """What has come and is not read."""
        return self._text[self._at :]

    def next(self) -> Steps:
        """The next character, which is not taken; empty: the answer has ended."""
        while self._at == len(self._text) and not self.over:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> None:
        self.tried.append(self._text[self._at : self._at + count])
        self._at += count

    def given_up(self) -> str:
        """What was tried, and is none of that."""
        tried = "".join(self.tried)
        self.tried.clear()
        return tried

    def skip(self, letters: str) -> Generator[None, None, None]:
        while (letter := (yield from self.next())) and letter in letters:
            self.take()

    def takes(self, mark: str) -> Tries:
        """Takes a mark, if it comes next."""
        while len(self._text) - self._at < len(mark) and not self.over and mark.startswith(self.rest):
            yield
        if there := self._text.startswith(mark, self._at):
            self.take(len(mark))
        return there

    def until(self, mark: str) -> tuple[str, bool]:
        """What comes before a mark, and whether that has come, which is taken; else all that is no beginning of one."""
        found = self._text.find(mark, self._at) if mark else -1
        held = 0 if self.over or found >= 0 else _begun(self.rest, mark)
        upto = found if found >= 0 else len(self._text) - held
        text, self._at = self._text[self._at : upto], upto + (len(mark) if found >= 0 else 0)
        return text, found >= 0


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1) if mark[:1] in text[1 - len(mark) :] else ()
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


class AnswerParser:
    """Reads an answer while it comes in; however it is cut into pieces, the parts are the same.

    What cannot be read as a call is content. Blanks before and after reasoning and calls are left out, unless there is
    content beside them.
    """

    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self._input = Input()
        self._blanks = ""  # before content, if any follows
        self._said: list[tuple[What, int, str]] = []  # pieces, with the index of their call
        self.calls = 0  # that have begun
        self.within = False  # the latest of them has not ended
        self._reading = self._answer()

    def feed(self, text: str) -> list[Said]:
        """The parts in the text that comes next."""
        self._input.add(text)
        next(self._reading, None)
        pieces, self._said = self._said, []
        return [  # with ids as templates of Mistral's demand
            Said(what, "".join(text for *_, text in group), call, secrets.token_hex(5)[:9] if what is What.CALL else "")
            for (what, call), group in groupby(pieces, key=itemgetter(0, 1))
        ]

    def end(self) -> list[Said]:
        """What was held back, once the answer has ended."""
        self._input.over = True
        return self.feed("")

    def _answer(self) -> Generator[None, None, None]:
        if self.form.reasoning is not None:
            yield from self._reasoning(self.form.reasoning)
        tools = self.form.tools
        yield from self._input.skip(BLANKS)
        self._blanks += self._input.given_up()
        unmarked = tools is not None and (tools.bare or (self.form.bare and not tools.spelled))
        if tools is not None and unmarked and (yield from self._input.next()) in ("{", "["):
            yield from self._all_calls(tools)
        mark = tools.begin if tools is not None else ""
        while (yield from self._until(mark, What.CONTENT)):
            self._input.tried.append(mark)
            yield from self._all_calls(tools or ToolFormat())

    def _reasoning(self, marks: Reasoning) -> Generator[None, None, None]:
        yield from self._input.skip(BLANKS)
        blanks = self._input.given_up()
        if not (yield from self._input.takes(marks.begin)) and not marks.open:
            self._blanks = blanks
            return
        self._input.tried.clear()
        yield from self._until(marks.end, What.REASONING)
        yield from self._input.skip(BLANKS)
        self._input.tried.clear()

    def _all_calls(self, tools: ToolFormat) -> Generator[None, None, None]:
        """Calls, as many as come; the rest is content."""
        yield from self._input.skip(BLANKS + "[")
        while True:
            if not (yield from (self._call(tools) if (yield from self._input.next()) == "{" else self._named_call())):
                break
            self._input.tried.clear()
            yield from self._input.skip(BETWEEN)
            ended = bool(tools.end) and (yield from self._input.takes(tools.end))
            rest = self._input.rest
            if ended or (self._input.over and tools.end.startswith(rest)):  # or cut there
                self._input.take(0 if ended else len(rest))
                self._input.tried.clear()
                yield from self._input.skip(BLANKS)
                break
        left = self._input.given_up()
        if left.strip(BETWEEN + "["):
            self._say(What.CONTENT, left)
        else:
            self._blanks += left if not self.calls else ""

    def _call(self, tools: ToolFormat) -> Tries:
        """One call, if it is one; what does not fit after its name and arguments have been said is left out."""
        self._input.take()
        members, begun = dict[str, str](), False
        while True:
            yield from self._input.skip(BLANKS + ",")
            if (letter := (yield from self._input.next())) == "}":
                self._input.take()
                self.within = False
                break
            key = _read((yield from self._value())) if letter == '"' else None
            yield from self._input.skip(BLANKS)
            if key is None or (yield from self._input.next()) != ":" or not (begun or key in MEMBERS):
                return begun
            self._input.take()
            yield from self._input.skip(BLANKS)
            name = _read(members.get("name", ""))
            if key in ARGUMENTS and name and not begun and (yield from self._input.next()) == "{":
                begun = True
                self._begin(name)
                yield from self._value(said=True)
            else:
                members[key] = yield from self._value()
        given = next((members[key] for key in ARGUMENTS if key in members), "" if tools.bare else "{}")
        if not begun and given and (name := _read(members.get("name", ""))):
            begun = True
            self._begin(name)
            self._say(What.ARGUMENTS, "{}" if given == "null" else _read(given) or given)
        return begun

    def _named_call(self) -> Tries:
        """One call in Mistral's newer form, `name{"a": 1}` or `name[ARGS]{"a": 1}`, if it is one."""
        name = ""
        while (letter := (yield from self._input.next())) and (letter.isalnum() or letter in "_-."):
            name += letter
            self._input.take()
        if not name or self.form.tools is None or self.form.tools.begin not in self._input.tried:
            return False
        if letter == "[" and not (yield from self._input.takes(NAMED)):
            return False
        if (yield from self._input.next()) != "{":
            return False
        self._begin(name)
        yield from self._value(said=True)
        self.within = self._input.over
        return True

    def _value(self, said: bool = False) -> Steps:
        """A JSON value, to its end."""
        taken, depth, inside, escaped = list[str](), 0, False, False
        while letter := (yield from self._input.next()):
            if not inside and not depth and taken and letter in BLANKS + ",:}]":
                break  # after a number or a word
            taken.append(letter)
            self._input.take()
            if said:
                self._say(What.ARGUMENTS, letter)
            if inside:
                inside, escaped = escaped or letter != '"', letter == "\\" and not escaped
            else:
                inside = letter == '"'
                depth += (letter in "{[") - (letter in "}]")
            if not inside and not depth and letter in '"}]':
                break
        return "".join(taken)

    def _begin(self, name: str) -> None:
        self._input.tried.clear()
        self._blanks = ""
        self.calls, self.within = self.calls + 1, True
        self._say(What.CALL, name)

    def _say(self, what: What, text: str) -> None:
        if what is What.CONTENT and text:
            text, self._blanks = self._blanks + text, ""
        if what is What.CONTENT and self.form.must:
            return
        call = 0 if what in (What.REASONING, What.CONTENT) else self.calls - 1
        if (text or what is What.CALL) and (not call or self.form.most is None or call < self.form.most):
            self._said.append((what, call, text))

    def _until(self, mark: str, what: What) -> Tries:
        """Says what comes before a mark, and takes that; whether there was one."""
        while True:
            text, found = self._input.until(mark)
            self._say(what, text)
            if found or self._input.over:
                break
            yield
        if not found and self._blanks and what is What.CONTENT and not self.calls and not self.form.must:
            self._said.append((what, 0, self._blanks))
        return found


def _read(literal: str) -> str | None:
    """The text of a JSON string; None if it is none, or has half of a surrogate pair, which no reply can have."""
    if not literal.startswith('"'):
        return None
    try:
        found: str = json.loads(literal)
        found.encode()
    except ValueError:
        return None
    return found
