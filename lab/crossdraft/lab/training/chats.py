"""Chats made by templates, which call tools and write JSON: what `bundled:chat` learns to answer.

`chats.json` has the templates. Names of tools, of their parameters and what is asked for are drawn; words of held-out
chats are in no others.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from crossdraft.lab.training.corpus import SEED, is_held_out, read_corpus
from crossdraft.lab.training.data import IGNORED, LENGTH_GROUPS, Rows
from crossdraft.text.chat_template import ChatTemplate

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("chats.json").read_text(encoding="utf-8"))
WORDS = 4000  # of identifiers, the most frequent ones
LONGEST = 640  # tokens of a chat
HELD_OUT = 256  # chats
KINDS = ("word", "number", "topic", "city", "person", "id", "colour", "file")  # of drawn tools' parameters
END = "<|endoftext|>"
TEMPLATE = """\
{%- if tools -%}
tools:
{% for tool in tools %}{% set function = tool.function %}{% set parameters = function.parameters or {} %}
{{ function.name }}({% for name, one in (parameters.properties or {}).items() %}{{ ', ' if not loop.first }}{{ name }}
{{- '?' if name not in (parameters.required or []) }}: {{ one.enum | join('|') if one.enum else one.type or 'any' }}
{%- endfor %}){{ ': ' + function.description if function.description }}{{ '\\n' }}
{%- endfor %}{{ eos_token }}
{%- endif %}
{%- for message in messages %}
{{- message.role + ':\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}
"""
Message = dict[str, Any]
Tool = dict[str, Any]  # as in `chats.json`


@cache
def _words(kind: str, held_out: bool) -> list[str]:
    if kind != "word":
        return [word for word in DATA["words"][kind] if is_held_out(word) is held_out] or DATA["words"][kind]
    found = Counter(word for one in read_corpus().training for word in re.findall(r"\b[a-z]{3,9}\b", one.text))
    return [word for word, _ in found.most_common(WORDS) if is_held_out(word) is held_out]


class _Values(dict[str, Any]):
    """What stands for the places of a template, drawn when they are first asked for; `said` has other spellings."""

    def __init__(self, draw: Random, held_out: bool) -> None:
        super().__init__()
        self._draw, self._held_out, self.said = draw, held_out, dict[str, str]()

    def __missing__(self, place: str) -> Any:
        self[place] = found = self._of(place.rstrip("123"), place)
        return found

    def _of(self, kind: str, place: str) -> Any:
        draw, word = self._draw, lambda: self._draw.choice(_words("word", self._held_out))
        match kind:
            case "number":
                return draw.choice([draw.randint(0, 30), draw.randint(0, 300), draw.randint(0, 9999)])
            case "expression":
                values, sign = [str(draw.randint(1, 10 ** draw.randint(1, 3))) for _ in range(3)], draw.choice("+-*/")
                if draw.random() < 0.3:
                    spelled = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
                    self.said[place] = f"{values[0]} {spelled} {values[1]}"
                more = f" {draw.choice('+-*')} {values[2]}" if place not in self.said and draw.random() < 0.3 else ""
                return f"{values[0]} {sign} {values[1]}{more}"
            case "time":
                return f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}"
            case "id":
                return draw.choice("ABCX") * draw.randint(0, 2) + str(draw.randint(10, 99999))
            case "file":
                return draw.choice(["", "/tmp/", "docs/"]) + word() + draw.choice([".txt", ".py", ".json", ".md"])
            case "topic" | "word":
                text = " ".join(word() for _ in range(draw.randint(1, 3) if kind == "topic" else 1))
                if draw.random() < 0.15:
                    self.said[place] = f'"{text}"'
                return text
        return (
            word().capitalize() if kind in ("city", "person") and draw.random() < 0.4 else draw.choice(self.all(kind))
        )

    def all(self, kind: str) -> list[str]:
        return _words(kind, self._held_out)

    def filled(self, text: str) -> str:
        """A template with the values as they are said."""
        return re.sub(r"{(\w+)}", lambda one: self.said.get(one[1], "") or str(self[one[1]]), text)


class _Chat:
    """One that is being made."""

    def __init__(self, draw: Random, held_out: bool) -> None:
        self._draw, self._held_out = draw, held_out
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []
        if draw.random() < 0.4:
            self._say("system", draw.choice(DATA["systems"]))
        kind = draw.random()
        some = draw.sample([*DATA["tools"], *[None] * 10], draw.randint(1, 4))
        offered = [self._tool(one) for one in some] if kind > 0.2 or draw.random() < 0.3 else []
        self.tools = [self._shown(one) for one in offered]
        if kind < 0.16:
            self._json()
        elif kind < 0.25:
            self._talk()
        else:
            for _ in range(draw.choice([1, 1, 2])):
                self._call([draw.choice(offered) for _ in range(draw.choice([1, 1, 1, 1, 1, 2]))])
                if draw.random() < 0.1:
                    self._talk()

    def _say(self, role: str, content: str, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def _talk(self) -> None:
        asked, answer = self._draw.choice(DATA["talk"])
        self._say("user", asked)
        self._say("assistant", answer)

    def _json(self) -> None:
        fact, places = self._draw.choice(DATA["facts"])
        values = _Values(self._draw, self._held_out)
        picked = self._draw.sample([*places], self._draw.randint(1, len(places)))
        keys = {place: self._draw.choice(places[place]) for place in picked}
        ask = self._draw.choice(DATA["extract"]).replace("{keys}", ", ".join(keys.values()))
        self._say("user", values.filled(ask.replace("{fact}", fact)))
        self._say("assistant", json.dumps({key: values[place] for place, key in keys.items()}))

    def _tool(self, tool: Tool | None) -> Tool:
        """A tool with one name for everything: of the templates, or else drawn."""
        draw = self._draw
        words = [draw.choice(_words("word", self._held_out)) for _ in range(6)]
        if tool is None:
            places = {
                f"{kind}{at or ''}": [words[3 + at]]
                for at, kind in enumerate(draw.choices(KINDS, k=draw.randint(1, 3)))
            }
            said = " ".join(words[: draw.randint(1, 3)])
            name, pairs = said.replace(" ", "_"), [(names[0], f"{{{place}}}") for place, names in places.items()]
            given = [", ".join(f"{key}{mark}{value}" for key, value in pairs) for mark in (" is ", " ", " = ")]
            asks = [
                f"Use {name} with {given[1]}.",
                f"{said.capitalize()}: {given[0]}",
                f"Please {said}, {given[2]}",
                f"Call {name}({given[2]})",
                f"I want to {said}. {given[0].capitalize()}.",
            ]
            tool = {"names": [name], "about": [said], "parameters": places, "asks": asks}
            tool["results"] = [["{topic2}", "The result is {topic2}."], ["{number3}", "The result is {number3}."]]
        names = {
            part: {place: draw.choice(some) for place, some in tool.get(part, {}).items()}
            for part in ("parameters", "optional")
        }
        if draw.random() < 0.3:
            names["optional"] |= {"": words[0]}  # nobody ever gives it
        about = draw.choice([*tool["about"], *tool["about"], ""])
        return tool | {"name": draw.choice(tool["names"]), "about": about, **names, "listed": draw.random() < 0.7}

    def _shown(self, tool: Tool) -> dict[str, Any]:
        def schema(place: str) -> dict[str, Any]:
            kind = place.rstrip("123")
            listed = {"enum": _Values(self._draw, self._held_out).all(kind)} if kind in DATA["choices"] else {}
            return {"type": "integer" if kind == "number" else "string"} | (listed if tool["listed"] else {})

        properties = {name: schema(place) for place, name in (tool["parameters"] | tool["optional"]).items()}
        parameters = {"type": "object", "properties": properties, "required": [*tool["parameters"].values()]}
        about = {"description": tool["about"]} if tool["about"] else {}
        return {"type": "function", "function": {"name": tool["name"], "parameters": parameters, **about}}

    def _call(self, tools: Sequence[Tool]) -> None:
        """What is asked of some tools, their calls and results, and what is made of these."""
        draw, asked, calls, told = self._draw, list[str](), list[dict[str, Any]](), list[tuple[str, str]]()
        for tool in tools:
            values = _Values(draw, self._held_out)
            asked.append(values.filled(draw.choice(tool["asks"])))
            given = tool["parameters"]
            for place, name in tool["optional"].items():
                if place and draw.random() < 0.4:
                    asked.append(values.filled(draw.choice(tool["with"])))
                    given = given | {place: name}
            arguments = {name: values[place] for place, name in given.items()}
            calls.append({"id": "", "type": "function", "function": {"name": tool["name"], "arguments": arguments}})
            told.append(tuple(map(values.filled, draw.choice(tool["results"]))))
        self._say("user", draw.choice(["", "", "", "", "Hi! ", "Please: "]) + " ".join(asked))
        self._say("assistant", "", tool_calls=calls)
        for result, _ in told:
            self._say("tool", result)
        self._say("assistant", " ".join(answer for _, answer in told))


def chat_ids(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """A chat as the model reads it, and its labels: what the assistant says."""
    template, ids, labels, done = ChatTemplate(TEMPLATE, (("eos_token", END),)), list[int](), list[int](), 0
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = template.render(messages[:at], {"tools": tools})
            whole = template.render(messages[: at + 1], {"tools": tools, "add_generation_prompt": False})
            read, said = tokenizer(prompt[done:]).input_ids, tokenizer(whole[len(prompt) :]).input_ids
            ids, labels, done = [*ids, *read, *said], [*labels, *[IGNORED] * len(read), *said], len(whole)
    return ids, labels


def chat_rows(step: int, rows: int, tokenizer: PreTrainedTokenizerFast, held_out: bool = False) -> Rows:
    """The chats of one step, about equally long ones: a function of the step alone."""
    draw, made = Random(f"{SEED} {held_out} {step}"), list[tuple[list[int], list[int]]]()
    while len(made) < LENGTH_GROUPS * rows:
        chat = _Chat(draw, held_out)
        made += [found for found in [chat_ids(chat.messages, chat.tools, tokenizer)] if len(found[0]) <= LONGEST]
    made.sort(key=lambda one: len(one[0]))
    first = 0 if held_out else draw.randrange(LENGTH_GROUPS) * rows
    group = made if held_out else made[first : first + rows]
    length = max(len(ids) for ids, _ in group)
    filled = [
        [[*part, *[fill] * (length - len(part))] for part, fill in zip(one, (0, IGNORED), strict=True)] for one in group
    ]
    both = torch.from_numpy(np.array(filled, dtype=np.int64))
    return both[:, 0], both[:, 1]
