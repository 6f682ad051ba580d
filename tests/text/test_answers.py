"""Answers in the forms of models, read while they come in, and the grammars of calls."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.text import answers
from crossdraft.text.answers import REASONINGS, TOOL_FORMATS, AnswerForm, AnswerParser, Function, Reasoning, What, after
from crossdraft.text.grammar import Grammar, GrammarCompiler, GrammarError, of_letters
from crossdraft.text.letters import NOTHING, ControlRole, from_bytes

HERMES, LLAMA, MISTRAL, JSON = (TOOL_FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "json"))
R1, QWEN = REASONINGS["deepseek_r1"], REASONINGS["qwen3"]
F = '{"name": "f", "arguments": {"city": "Pa}r\\"is"}}'
CALLED = [("call", "f"), ("arguments", '{"city": "Pa}r\\"is"}')]
SCHEMA = '{"type": "object", "properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"]}'
FUNCTIONS = (Function("f", SCHEMA), Function('g"h', '{"$defs": {"x": {"const": 1}}, "$ref": "#/$defs/x"}'))
Parts = list[tuple[str, str]]


def parts(form: AnswerForm, *pieces: str) -> Parts:
    """What and text, of pieces of one part together."""
    parser = AnswerParser(form)
    said = [*(one for piece in pieces for one in parser.feed(piece)), *parser.end()]
    groups = groupby(said, lambda one: (one.what, one.call))
    return [(what, "".join(one.text for one in each)) for (what, _), each in groups]


CASES: list[tuple[AnswerForm, str, Parts]] = [
    (AnswerForm(), '<tool_call>{"name"', [("content", '<tool_call>{"name"')]),
    (AnswerForm(HERMES), "  \n", [("content", "  \n")]),
    (AnswerForm(HERMES), f"So.\n<tool_call>\n{F}\n</tool_call>", [("content", "So.\n"), *CALLED]),
    (AnswerForm(HERMES), f"\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{F}</tool_call>\n", CALLED * 2),
    (AnswerForm(HERMES, most=1), f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call>", CALLED),
    (AnswerForm(HERMES), f"<tool_call>{F}</tool_call>\nDone.", [*CALLED, ("content", "Done.")]),
    (AnswerForm(HERMES), '<tool_call>{"arguments": {"a": [1]}, "id": 7, "name": "g"}',
     [("call", "g"), ("arguments", '{"a": [1]}')]),
    (AnswerForm(HERMES), '<tool_call>{"name": "g"}</tool_call>', [("call", "g"), ("arguments", "{}")]),
    (AnswerForm(HERMES), '<tool_call>\n{"name": "f", "arguments": {"ci', [("call", "f"), ("arguments", '{"ci')]),
    (AnswerForm(HERMES), '<tool_call>\n{"name": "f", "argu', [("content", '<tool_call>\n{"name": "f", "argu')]),
    (AnswerForm(HERMES, must=True), '<tool_call>\n{"name": "f", "argu', []),
    (AnswerForm(HERMES, must=True), f"<tool_call>\n{F}\n</tool_call>\n<too", CALLED),
    (AnswerForm(HERMES, R1, must=True), "Hm</think>\n<too", [("reasoning", "Hm")]),
    (AnswerForm(HERMES), "a <tool_call> is a mark", [("content", "a <tool_call> is a mark")]),
    (AnswerForm(HERMES), "a <tool", [("content", "a <tool")]),
    (AnswerForm(MISTRAL), f"[TOOL_CALLS][{F}, {F}]", CALLED * 2),
    (AnswerForm(MISTRAL), 'Hm[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{"b": {}}',
     [("content", "Hm"), ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", '{"b": {}}')]),
    (AnswerForm(HERMES, bare=True), F, [("content", F)]),
    (AnswerForm(MISTRAL), f"[{F}]", [("content", f"[{F}]")]),
    (AnswerForm(MISTRAL, bare=True), f"[{F}]", CALLED),
    (AnswerForm(MISTRAL), '[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": 1}"}]',
     [("call", "f"), ("arguments", '{"a": 1}')]),
    (AnswerForm(LLAMA), '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": null}}',
     [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", '{"x": null}')]),
    (AnswerForm(LLAMA), '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
     [("call", "f"), ("arguments", "{}")]),
    (AnswerForm(LLAMA), '{"name": "Bo", "age": 3}', [("content", '{"name": "Bo", "age": 3}')]),
    (AnswerForm(JSON), "[1, 2]", [("content", "[1, 2]")]),
    (AnswerForm(JSON), ' say {"name": "f"}', [("content", ' say {"name": "f"}')]),
    (AnswerForm(JSON), '{"name": "\\ud800", "arguments": {}}', [("content", '{"name": "\\ud800", "arguments": {}}')]),
    (AnswerForm(JSON), '{"name": "f", "arguments": "\\ud83d"}', [("call", "f"), ("arguments", '"\\ud83d"')]),
    (AnswerForm(None, R1), "Hm.\n</think>\n\nYes", [("reasoning", "Hm.\n"), ("content", "Yes")]),
    (AnswerForm(None, R1), "<think>Hm", [("reasoning", "Hm")]),
    (AnswerForm(None, QWEN), "\n<think>Hm</think>Yes", [("reasoning", "Hm"), ("content", "Yes")]),
    (AnswerForm(None, QWEN), "\nHm</think>", [("content", "\nHm</think>")]),
    (AnswerForm(HERMES, R1), f"a <tool_call>{F}</think>\n<tool_call>{F}</tool_call>",
     [("reasoning", f"a <tool_call>{F}"), *CALLED]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "wanted"), CASES)
def test_the_parts_of_an_answer_however_it_comes(form: AnswerForm, text: str, wanted: Parts) -> None:
    assert (parts(form, text), parts(form, *text)) == (wanted, wanted)


PIECES = st.sampled_from(
    [*"[]{},: \n\"\\x", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", '"name"', '"f"',
     '"arguments"', F, '"parameters": {}'],
)  # fmt: skip
FORMS = st.builds(
    AnswerForm, st.sampled_from([None, *TOOL_FORMATS.values()]), st.sampled_from([None, R1, QWEN]), st.booleans()
)


@given(FORMS, st.lists(PIECES, max_size=12).map("".join), st.data())
@settings(max_examples=400, deadline=None)
def test_any_split_of_a_text_gives_the_same_parts(form: AnswerForm, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parts(form, *(text[start:end] for start, end in pairwise([0, *cuts, len(text)]))) == parts(form, text)


@given(st.text(alphabet='<tool_cal>/hink {}[]"ab\n'), st.data())
def test_without_marks_the_text_is_the_content(text: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([AnswerForm(HERMES), AnswerForm(JSON), AnswerForm(MISTRAL)]))
    if '"name"' not in text:
        assert "".join(said for _, said in parts(form, text)) == text


def test_json_that_is_no_call_is_shown_while_it_comes() -> None:
    parser = AnswerParser(AnswerForm(JSON))
    shown = [one.text for piece in ('{"ci', 'ty":', ' "', "Par") for one in parser.feed(piece)]
    assert shown == ['{"city":', ' "', "Par"]


def test_calls_have_ids_of_their_own_as_mistrals_templates_want_them() -> None:
    ids = [one.id for one in AnswerParser(AnswerForm(JSON)).feed(f"[{F}, {F}]") if one.what is What.CALL]
    assert len({*ids}) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)


def test_the_format_and_the_reasoning_that_a_prompt_shows() -> None:
    templates = ("{{ '<tool_call>' }}", "[TOOL_CALLS]", "Environment: ipython", "{{ tools }}")
    assert [*map(answers.format_of, templates)] == ["hermes", "mistral", "llama3_json", "json"]
    assert after(QWEN, "<|assistant|><think>\n") == Reasoning("<think>", "</think>", open=True)
    assert (after(R1, "<think>\n\n</think>\n\n"), after(QWEN, "<|assistant|>")) == (None, QWEN)


def accepted(grammar: Grammar | None, text: str) -> bool:
    """Whether an output may be this text and end there."""
    columns = [ControlRole.END_OF_SEQUENCE.letter, from_bytes(b"\xff")]
    matcher, letters = GrammarCompiler(columns, [0]).matcher(grammar), from_bytes(text.encode())
    if not matcher.fitting(NOTHING, letters).startswith(letters):
        return False
    try:
        return bool(matcher.masks(letters, [NOTHING])[0][0] & 1)
    except GrammarError:
        return False


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("reasoning", [None, R1, QWEN])
def test_what_the_grammar_of_calls_allows_is_read_as_calls(name: str, most: int | None, reasoning: Reasoning | None):
    form = AnswerForm(TOOL_FORMATS[name], reasoning, True, most)
    tools = TOOL_FORMATS[name]
    one = f'{{"name": "f", "{tools.arguments}": {{"city": "a"}}}}'
    called = [("call", "f"), ("arguments", '{"city": "a"}')]
    begin = tools.begin if tools.spelled else ""
    for count in (1, 2):
        if tools.listed:
            text = f"{begin}[{', '.join([one] * count)}]"
        elif tools.end:
            text = "\n".join([f"{begin}\n{one}\n{tools.end}"] * count)
        else:
            text = "; ".join([one] * count)
        said = [] if reasoning is None else [("reasoning", "Hm")]
        text = {None: "", R1: "Hm</think>\n\n", QWEN: "<think>Hm</think>"}[reasoning] + text
        assert accepted(form.grammar(FUNCTIONS, False), text) == (count == 1 or most is None)
        assert parts(form, text) == said + called * (1 if most else count)
        assert not accepted(form.grammar(FUNCTIONS, False), text.replace('"a"', '"c"'))


def test_of_tools_whose_schema_is_wrong_the_first_one_is_named_without_the_grammar() -> None:
    wrong = [Function("f", "{}"), Function("Get Weather", '{"properties": {"a": {"not": {}}}}')]
    grammar = AnswerForm(HERMES).grammar(wrong, False)
    reason = 'function_1_get_weather_arguments: failed to compile JSON schema: Unimplemented keys: ["not"]'
    with pytest.raises(GrammarError) as refused:
        of_letters().matcher(grammar)
    assert str(refused.value) == f"Grammar error: {reason}, at $.properties.a.not"


def test_content_beside_calls() -> None:
    form, call = AnswerForm(HERMES), '<tool_call>\n{"name": "f", "arguments": {"city": "b"}}\n</tool_call>'
    free = form.grammar(FUNCTIONS, True)
    texts = ("Hi", f"Hi {call} and {call}!", "Hi <tool_call>\n[", call[:-1])
    assert [accepted(free, text) for text in texts] == [True, True, False, False]
    assert AnswerForm(MISTRAL).grammar(FUNCTIONS, True) is None
    for content, text in (
        (Grammar.json({"const": 1}), "1"),
        (Grammar.choice(["x", "y"]), "y"),
        (Grammar.regex("a+"), "aa"),
        (Grammar.ebnf('root ::= "z"'), "z"),
        (Grammar.ebnf('?start: "z"'), "z"),
    ):
        assert AnswerForm().grammar((), True, content) is content
        assert accepted(AnswerForm(None, R1).grammar((), True, content), f"Hm</think>{text}")
        for one, wanted in ((text, True), (call, True), (call + text, False), ("b", False)):
            assert accepted(form.grammar(FUNCTIONS, True, content), one) == wanted
