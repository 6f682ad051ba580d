"""Grammars against languages that are listed word by word: which tokens of a vocabulary may follow any text."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from crossdraft.text import grammar as grammar_module
from crossdraft.text.grammar import MAX_LENGTH, Bits, Grammar, GrammarCompiler, GrammarError, GrammarKind, of_letters
from crossdraft.text.letters import NOTHING, ControlRole, Letters, Side, from_bytes

EOS = ControlRole.END_OF_SEQUENCE.letter
OTHER = Side.TARGET.control(0)  # a control symbol that ends nothing
WORDS = st.text('ab"é', min_size=1, max_size=4)
LANGUAGES = st.lists(WORDS, min_size=1, max_size=5, unique=True)
VOCABULARIES = st.lists(st.binary(min_size=1, max_size=3) | WORDS.map(str.encode), max_size=12)
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LENGTH, NUMBER = {"minLength": "x"}, {"properties": {"a": 3}}
UNSATISFIABLE = {"type": "object", "properties": {"a": {"type": "string", "const": 3}}, "required": ["a"]}
CIRCULAR = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}


def spelled(texts: list[str]) -> list[Letters]:
    return [from_bytes(text.encode()) for text in texts]


def matcher_of(grammar: Grammar, columns: list[Letters]) -> grammar_module.GrammarMatcher:
    return GrammarCompiler(columns, [at for at, one in enumerate(columns) if one == EOS]).matcher(grammar)


def columns_in(bits: Bits, count: int) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.unpackbits(bits, axis=1, count=count, bitorder="little")]


def allowed(words: list[Letters], columns: list[Letters], text: Letters) -> list[int]:
    """Those after which the text still begins a word; ends where it is one, or has ended."""
    if text.endswith(EOS):
        return [at for at, one in enumerate(columns) if one == EOS] if text[:-1] in words else []
    begun = {text + one for one in columns if any(word.startswith(text + one) for word in words)}
    return [at for at, one in enumerate(columns) if (text in words if one == EOS else text + one in begun)]


def written(words: list[str], kind: int) -> Grammar:
    rules = "start: " + " | ".join(map(json.dumps, words))
    made = Grammar.choice(words), Grammar.regex("|".join(words)), Grammar.ebnf(rules), Grammar.json({"enum": words})
    return made[kind]


@given(LANGUAGES, VOCABULARIES, st.integers(0, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_masks_are_the_tokens_after_which_a_word_can_still_be_written(texts, tokens, kind, data):
    """At any place of any word, in any order, along trees of paths, and after the end."""
    grammar = written(texts, kind)
    words = spelled([json.dumps(text, ensure_ascii=False) for text in texts] if kind == 3 else texts)
    columns = [*map(from_bytes, tokens), EOS, *sorted({Letters(one) for word in words for one in word}), OTHER, EOS]
    matcher = matcher_of(grammar, columns)
    places = [Letters(word[:at]) for word in words for at in range(len(word) + 1)] + [Letters(w + EOS) for w in words]
    for text in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=6)):
        following = [place[len(text) :] for place in places if place.startswith(text)]
        paths = [Letters(""), *map(Letters, data.draw(st.lists(st.sampled_from(following), max_size=4)))]
        found = columns_in(matcher.masks(text, paths), len(columns))
        assert found == [allowed(words, columns, Letters(text + path)) for path in paths]


def test_a_path_that_does_not_fit_gets_all_tokens_that_do_not_end_the_output() -> None:
    columns = [*spelled(["a", "b"]), EOS]
    matcher = matcher_of(Grammar.choice(["ab"]), columns)
    paths = [NOTHING, *map(Letters, ["b", "aa", EOS, "ab" + OTHER, "a"])]
    assert columns_in(matcher.masks(NOTHING, paths), 3) == [[0], [0, 1], [0, 1], [0, 1], [0, 1], [1]]


def test_a_state_without_a_token_is_an_error_that_names_it() -> None:
    columns = [*spelled(["a", "b"]), EOS]
    matcher = matcher_of(Grammar.choice(["abc"]), columns)
    assert columns_in(matcher.masks(NOTHING, [NOTHING, Letters("ab")]), 3) == [[0], [0, 1]]
    with pytest.raises(GrammarError, match="the grammar allows no token of this vocabulary after 'ab'"):
        matcher.masks(Letters("ab"), [NOTHING])
    assert columns_in(matcher.masks(Letters("ab"), [NOTHING], must=False), 3) == [[0, 1]]
    assert columns_in(matcher.masks(NOTHING, [NOTHING]), 3) == [[0]]  # nothing is spoilt by it


def test_a_text_that_may_end_is_ended_by_further_columns_too() -> None:
    columns = [*spelled(["a"]), OTHER, EOS]
    compiler = GrammarCompiler(columns, [2])
    matcher = compiler.matcher(Grammar.regex("a+"), ends=[1])
    assert columns_in(matcher.masks(NOTHING, [NOTHING, Letters("a")]), 3) == [[0], [0, 1, 2]]
    assert columns_in(compiler.matcher(Grammar.regex("a+")).masks(Letters("a"), [NOTHING]), 3) == [[0, 2]]


@given(LANGUAGES, WORDS, st.data())
@settings(max_examples=100, deadline=None)
def test_what_fits_of_a_guess_and_what_is_forced_after_it(texts: list[str], guess: str, data: st.DataObject) -> None:
    words = spelled(texts)
    text = Letters((word := data.draw(st.sampled_from(words)))[: data.draw(st.integers(0, len(word)))])
    (following,) = spelled([guess])
    fits = max(
        (Letters(following[:at]) for at in range(len(following) + 1)),
        key=lambda part: len(part) * any(one.startswith(text + part) for one in words),
    )
    while text + fits not in words:
        (*nexts,) = {one[len(text + fits)] for one in words if one.startswith(text + fits)}
        if len(nexts) > 1:
            break
        fits = Letters(fits + nexts[0])
    assert of_letters().matcher(Grammar.choice(texts)).fitting(text, following) == fits


def test_white_space_is_free_unless_it_is_not_wanted() -> None:
    columns = spelled([" ", "\n", '"', "}"])
    free, none = (matcher_of(Grammar.json(OBJECT, **more), columns) for more in ({}, {"whitespace_flexible": False}))
    paths = spelled(["{", '{"n":', '{"n":1'])
    assert columns_in(free.masks(NOTHING, paths), 4) == [[0, 1, 2], [0, 1], [0, 1, 3]]
    assert columns_in(none.masks(NOTHING, paths), 4)[::2] == [[2], [3]]
    assert of_letters().matcher(Grammar.json(OBJECT, whitespace_flexible=False)).fitting(NOTHING, NOTHING) == '{"n":'


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json({"type": "obj"}), r"error: failed to compile JSON schema: Invalid type: obj, at \$\.type$"),
        (Grammar.json({"properties": {"a": {"items": LENGTH}}}), r"at \$\.properties\.a\.items\.minLength$"),
        (Grammar.json({"anyOf": [{}, NUMBER]}), r"object or boolean, at \$\.anyOf\.1\.properties\.a$"),
        (Grammar.json({"$defs": {"a": {"enum": "x"}}, "$ref": "#/$defs/a"}), r"at \$\.\$defs\.a\.enum$"),
        (Grammar.json({"properties": {"b": {"$ref": "#/$defs/x"}}}), r"at \$\.properties\.b\.\$ref$"),
        (Grammar.json({"properties": ["a"]}), r"properties must be an object, at \$\.properties$"),
        (Grammar.json({"const": {"type": "x"}, "properties": {"b": {"type": "x"}}}), r"at \$\.properties\.b\.type$"),
        (Grammar.ebnf('start: a\na: "x" %json {"items": {"type": "y"}}'), r"error: a: .*, at \$\.items\.type$"),
        (Grammar.json({"properties": {"a.b": {"type": "x"}}}), r'at \$\.properties\["a\.b"\]\.type$'),
        (Grammar.json({"type": "integer", "minimum": 5, "maximum": 3}), r"greater than maximum \(3\), at \$$"),
        (Grammar.json(UNSATISFIABLE), r"required property 'a' is unsatisfiable, at \$\.properties\.a$"),
        (Grammar.json({"not": {"type": "string"}}), "Unimplemented keys"),
        (Grammar.json("[]"), "a JSON schema must be an object"),
        (Grammar.json('{"a'), "Unterminated string"),
        (Grammar.json("not json"), "must be an object, .*and 'not json' is not JSON: Expecting value at character 0"),
        (Grammar("choice", "yes"), "must be a list of texts.*and 'yes' is not JSON"),
        (Grammar.regex("(ab"), r"error: invalid regex .*unclosed group"),
        (Grammar.regex(r"[^\s\S]"), "no text can match it"),
        (Grammar.regex("^(?=a)b"), "look-around"),
        (Grammar.json('{"const": "\\ud800"}'), "hex escape"),
        (Grammar("choice", "[]"), "a choice must be a list of texts, at least one"),  # type: ignore[arg-type]
        (Grammar.ebnf("start: other"), r"^Grammar error: line 1, column 8: unknown name: \"other\"$"),
        (Grammar.ebnf('root ::= "a" | )'), "GBNF|Expected"),
        (Grammar.ebnf("start: a\na[max_tokens=5]: /b+/"), "max_tokens= is not served: a grammar is over letters"),
        (Grammar.ebnf("?start: <[65]>"), r"<\[65\]> is not served"),
        (Grammar.ebnf('start: "a" <|eos|>'), r"<\|eos\|> is not served"),
        (Grammar.json({"$ref": "http://example.com/schema"}), "http://example.com/schema"),
        (Grammar.json(CIRCULAR), "no text can match it: a part of it matches nothing, or leads only back to itself"),
        (Grammar.json('{"a":' * 10_000 + "1" + "}" * 10_000), "recursion"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_librarys_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as refused:
        of_letters().matcher(grammar)
    assert str(refused.value).startswith("Grammar error: ")
    assert "no_forcing" not in str(refused.value)


@pytest.mark.parametrize("kind", ["rules", "terminals", "references"])
def test_references_as_deep_as_a_grammar_may_have_do_not_end_the_process(kind: str) -> None:
    """In a process of its own: they did."""
    names = [f"r{at}" for at in range(1800 if kind == "references" else 4000)]
    if kind == "references":
        defined = {one: {"$ref": f"#/$defs/{other}"} for one, other in pairwise(names)} | {names[-1]: {"enum": ["ab"]}}
        grammar = Grammar.json(json.dumps({"$defs": defined, "$ref": "#/$defs/r0"}, separators=(",", ":")))
    else:
        rules = "\n".join(f"{one}: {other}" for one, other in pairwise(names))
        text = f'r0\n{rules}\n{names[-1]}: "ab"'
        grammar = Grammar.ebnf(f"start: {text if kind == 'rules' else text.replace('r', 'R')}")
    assert len(grammar.text) > MAX_LENGTH * 3 // 4
    program = f"import sys; from crossdraft.text.grammar import *; kind = {grammar.kind.value!r}; none = Letters('')"
    program += "; print(of_letters().matcher(Grammar(kind, sys.stdin.read())).fitting(none, none))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=grammar.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(' "\n')) == (0, "ab"), done.stderr


def test_schemas_on_lines_of_rules_are_counted_by_themselves() -> None:
    """However many marks there are: a pattern that looked again from each of them took hours for the last one."""
    many = ": %json {" * (MAX_LENGTH // 4)
    other_end = ("a: %json {" + "x" * (MAX_LENGTH - 9) + "}\v") * 2  # only \n ends a line
    large = "a: %json {" + "x" * MAX_LENGTH + "}", "a" * MAX_LENGTH + "\na: %json {}"
    for text in (many, many + "}", *large, other_end):
        with pytest.raises(ValueError, match="a grammar, or the schema of a tool, may have"):
            Grammar(GrammarKind.EBNF, text)
    for text in ("a: %json {" + "x\u2028" * (MAX_LENGTH // 2 - 9) + "}\n") * 9, "a: %json {: %json {}}":
        Grammar(GrammarKind.EBNF, text)
    with pytest.raises(ValueError, match="a grammar, or the schema of a tool, may have"):
        Grammar("json", "{" + " " * MAX_LENGTH + "}")


@pytest.mark.parametrize(
    ("text", "fault"), [("", "is empty"), ("a" * 65537, "may have 65536"), (7, "a text, got 7"), ("\ud800", "Unicode")]
)
def test_a_grammar_is_a_text_of_limited_size(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Grammar.regex(text)


@pytest.mark.parametrize("texts", ["yes", ["yes", 1]])
def test_choices_that_are_no_list_of_texts_are_refused_at_once(texts: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="a choice must be a list of texts, at least one, got "):
        Grammar.choice(texts)
    with pytest.raises(ValueError, match="must be one of json, regex, choice, grammar, got 'xml'"):
        Grammar("xml", "a")  # type: ignore[arg-type]


def test_recursive_schemas_and_large_ones_are_compiled() -> None:
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    large = {"type": "object", "properties": {f"field{at}": {"type": "string"} for at in range(2000)}}
    columns = spelled(["[", "]", "{"])
    assert columns_in(matcher_of(Grammar.json(tree), columns).masks(NOTHING, spelled(["", "[[]"])), 3) == [[0], [1]]
    assert columns_in(matcher_of(Grammar.json(large), columns).masks(NOTHING, [NOTHING]), 3) == [[2]]


@pytest.mark.parametrize(
    ("grammar", "text", "reason"),
    [
        (Grammar.json({"properties": {f"f{at}": {} for at in range(2000)}}), "{", "items; max is 2000"),
        (Grammar.ebnf('start: a\na: "x" a "x" a | "x" | a "y" | a a a a | '), "x" * 500, "items; max is|too ambiguous"),
    ],
)
def test_what_takes_too_long_on_the_way_is_refused_and_says_so(grammar: Grammar, text: str, reason: str) -> None:
    matcher = matcher_of(grammar, spelled(["a"]))
    for _ in range(2):
        with pytest.raises(GrammarError, match=reason):
            matcher.masks(Letters(text), [NOTHING])
    with pytest.raises(GrammarError, match=reason):  # where it stands is not known any more
        matcher.masks(NOTHING, [NOTHING])


def test_a_matcher_stays_where_it_is_told_however_often_it_is_moved() -> None:
    """A long text with many turns back: nothing is left of what was tried and dropped."""
    schema = {"type": "array", "items": {"enum": ["ab", "abc", "b"]}}
    columns = [*spelled(list('[]",abc ')), EOS]
    grammar = Grammar.json(schema, whitespace_flexible=False)
    (text,) = spelled([json.dumps(["ab", "abc", "b"] * 40, separators=(",", ":"))])
    moved = matcher_of(grammar, columns)
    for short, long in pairwise(range(0, len(text) + 1, 7)):
        for at in (long, short, long):
            fresh = matcher_of(grammar, columns)
            assert (moved.masks(Letters(text[:at]), [NOTHING]) == fresh.masks(Letters(text[:at]), [NOTHING])).all()


def test_masks_do_not_depend_on_what_was_asked_before() -> None:
    """The library's own matcher, rolled back between these paths, takes white space after a number for that after a
    comma."""
    columns = spelled([chr(letter) for letter in range(9, 126)])
    grammar = Grammar.json({"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n"]})
    used, text = matcher_of(grammar, columns), Letters('{"n"')
    for paths in (
        [""],
        [":", "\t", "  "],
        [":  ", "\t    ", "  :", ":4", ": "],
        [":  0,", "\t    \t", "  :\n\n\n", ":4\n", ": \t", ":  1", ":  8}"],
        [":1,\t\t\n", "\n\n\n\n:1\n", ":1   ,", ":1 \n\n    ", "\n\n\n\n:1    ", ":1,\t\t "],
    ):
        rows = used.masks(text, spelled(paths), must=False)
        for path, row in zip(spelled(paths), rows, strict=True):
            taken = matcher_of(grammar, columns).masks(text, [path], must=False)
            assert columns_in(row[None], len(columns)) == columns_in(taken, len(columns)), path


def test_what_takes_too_long_to_compile_is_refused_and_others_are_not() -> None:
    """The library would take minutes, and gigabytes."""
    endless = Grammar.json({"type": "integer", "multipleOf": 99_999_989})
    for _ in range(2):  # the second time it is known
        reason = "takes more than 2 s of processor time: .*what costs may be multipleOf$"
        with pytest.raises(GrammarError, match=reason):
            of_letters().matcher(endless)
    assert of_letters().matcher(Grammar.json({"type": "integer", "multipleOf": 7})).fitting(NOTHING, Letters("14"))


def test_what_looks_like_a_token_within_texts_is_none() -> None:
    texts = 'start: "<|eos|>" /<[a-z]+>/ // <b>', 'root ::= "<a>" [^<>]', '?start: %json {"const": "max_tokens="}'
    for grammar in texts:
        assert of_letters().matcher(Grammar.ebnf(grammar))


def test_compiled_grammars_are_kept_as_far_as_they_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that several ask for at once is compiled once."""
    compiled, costs, waits = [], {"a": 0.4, "b": 0.7, "c": 0.1, "d": 5.0}, Event()

    def compile_(of: object, grammar: Grammar) -> tuple[LLMatcher, float]:
        if grammar.text not in costs:
            return real(of, grammar)
        waits.wait(60)
        compiled.append(grammar.text)
        return GrammarCompiler(spelled(["a"])).matcher(Grammar.regex("a+"))._start, costs[grammar.text]

    real, compiler = grammar_module._compile, GrammarCompiler()
    monkeypatch.setattr(grammar_module, "_compile", compile_)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(compiler.matcher, Grammar.regex("a")) for _ in range(4)]
        waits.set()
        assert all(one.result() for one in asked)
    assert compiled == ["a"]
    for text in ("c", "a", "b", "a", "c", "d", "d", "b"):
        compiler.matcher(Grammar.regex(text))
    assert compiled == ["a", "c", "b", "a", "c", "d", "b"]


@pytest.mark.parametrize(
    "text", ["root ::= foo", 'root ::= foo | "a"', 'foo ::= "a"', 'root ::= "a"\nfoo ::= bar', "   "]
)
def test_gbnf_that_lacks_a_rule_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="Grammar error: "):
        of_letters().matcher(Grammar.ebnf(text))
    assert of_letters().matcher(Grammar.ebnf('?start: "ab" | "cd"')).fitting(NOTHING, Letters("a")) == "ab"  # Lark's


CTRL_C = """
import os, signal
from crossdraft.text.grammar import Grammar, of_letters
of_letters().matcher(Grammar.regex("a"))
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.killpg(0, signal.SIGINT)
of_letters().matcher(Grammar.regex("b"))
"""


def test_ctrl_c_does_not_end_the_process_that_tries_grammars() -> None:
    """A terminal sends it to all processes of a command, which may go on until its outputs have ended."""
    command = [sys.executable, "-c", CTRL_C]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stderr) == (0, "")
