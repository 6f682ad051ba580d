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

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from crossdraft.lab.training.data import IGNORED, LENGTH_GROUPS, SEED, Rows, is_held_out, read_corpus
from crossdraft.text.chat_template import ChatTemplate

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("chats.json").read_text(encoding="utf-8"))
WORDS = 4000  # of identifiers, the most frequent ones
MADE_UP = 0.3  # of words: copied, not known
LONGEST = 640  # tokens of a chat
HELD_OUT = 128  # chats
KINDS = ("word", "number", "topic", "city", "person", "id", "colour", "file")  # of drawn tools' parameters
END = "<|endoftext|>"
TEMPLATE = Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8")
Message = dict[str, Any]
Tool = dict[str, Any]  # as in `chats.json`


@cache
def _words(kind: str, held_out: bool) -> list[str]:
    if kind != "word":
        return [word for word in DATA["words"][kind] if is_held_out(word) is held_out] or DATA["words"][kind]
    found = Counter(word for file in read_corpus().training for word in re.findall(r"\b[a-z]{3,9}\b", file.text))
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
        draw = self._draw

        def word() -> str:
            first, second = draw.choices(_words("word", self._held_out), k=2)
            return first[: draw.randint(1, 4)] + second[-draw.randint(1, 4) :] if draw.random() < MADE_UP else first

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
            word().capitalize()
            if kind in ("city", "person") and draw.random() < 0.4
            else draw.choice(_words(kind, self._held_out))
        )

    def filled(self, text: str) -> str:
        """A template with the values as they are said."""
        return re.sub(r"{(\w+)}", lambda found: self.said.get(found[1], "") or str(self[found[1]]), text)


class _Chat:
    """One that is being made."""

    def __init__(self, draw: Random, held_out: bool) -> None:
        self._draw, self._held_out = draw, held_out
        self.messages: list[Message] = []
        if draw.random() < 0.4:
            self._say("system", draw.choice(DATA["systems"]))
        kind = draw.random()
        some = draw.sample([*DATA["tools"], *[None] * 10], draw.randint(1, 4))
        offered = [self._tool(tool) for tool in some] if kind > 0.2 or draw.random() < 0.3 else []
        self.tools = [self._shown(tool) for tool in offered]
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
                f"{kind}{at or ''}": words[at] for at, kind in enumerate(draw.choices(KINDS, k=draw.randint(1, 3)))
            }
            said = " ".join(words[3 : draw.randint(4, 6)])
            given = [
                ", ".join(f"{name}{mark}{{{place}}}" for place, name in places.items()) for mark in (" is ", " ", " = ")
            ]
            tool = {
                "names": [said.replace(" ", "_")],
                "about": [said],
                "parameters": {place: [name] for place, name in places.items()},
                "asks": [ask.format(*given, said, said.replace(" ", "_"), said.capitalize()) for ask in DATA["asks"]],
                "results": DATA["results"],
            }
        needed, optional = (
            {place: draw.choice(some) for place, some in tool.get(part, {}).items()}
            for part in ("parameters", "optional")
        )
        # What nobody has said is the first one of those that may be, if there must be one.
        forced = all(place in DATA["choices"] for place in optional) and draw.random() < 0.5
        if not forced and draw.random() < 0.3:
            optional[""] = words[0]  # nobody ever gives it
        chosen = {"name": draw.choice(tool["names"]), "about": draw.choice([*tool["about"], *tool["about"], ""])}
        listed = forced or draw.random() < 0.7
        return tool | chosen | {"parameters": needed, "optional": optional, "forced": forced, "listed": listed}

    def _shown(self, tool: Tool) -> dict[str, Any]:
        def schema(place: str) -> dict[str, Any]:
            kind = place.rstrip("123")
            listed = {"enum": _words(kind, self._held_out)} if kind in DATA["choices"] else {}
            return {"type": "integer" if kind == "number" else "string"} | (listed if tool["listed"] else {})

        properties = {name: schema(place) for place, name in (tool["parameters"] | tool["optional"]).items()}
        required = tool["parameters"] | (tool["optional"] if tool["forced"] else {})
        parameters = {"type": "object", "properties": properties, "required": [*required.values()]}
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
                elif tool["forced"]:
                    values[place], given = _words(place, self._held_out)[0], given | {place: name}
            arguments = {name: values[place] for place, name in given.items()}
            calls.append({"id": "", "type": "function", "function": {"name": tool["name"], "arguments": arguments}})
            result, answer = map(values.filled, draw.choice(tool["results"]))
            told.append((result, answer))
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
        made += [ids for ids in [chat_ids(chat.messages, chat.tools, tokenizer)] if len(ids[0]) <= LONGEST]
    made.sort(key=lambda chat: len(chat[0]))
    first = 0 if held_out else draw.randrange(LENGTH_GROUPS) * rows
    group = made if held_out else made[first : first + rows]
    ids, labels = zip(*group, strict=True)
    return _padded(ids, 0), _padded(labels, IGNORED)


def _padded(rows: Sequence[list[int]], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
