"""Grammars: what an output must be, and which tokens of a vocabulary keep it so (structured outputs).

A grammar is over bytes, and so is where an output stands in it: a function of its letters, whatever tokens wrote them.
Each model has its own compiler, for its own columns of logits; the engine below is llguidance. A column may come next
if its letters do, whatever columns the tokenizer itself would write them with; one that ends outputs where the grammar
accepts, and only there.
"""

import atexit
import json
import re
import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from math import ceil
from signal import SIGXCPU
from threading import Barrier, Lock, Thread, local, stack_size
from time import process_time, thread_time
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from crossdraft.text.letters import FIRST_CONTROL, NOTHING, Letters, is_plain, to_bytes

Bits = NDArray[np.uint8]  # (n, ⌈columns / 8⌉): whether each column may come, the first in the lowest bit of a byte
MAX_LENGTH = 2**16  # characters of a grammar without its schemas, and of each schema
MAX_WHOLE = 2**20  # characters with all schemas
SCHEMA = ": %json "  # before a schema, to the end of the line
COSTLY = ("multipleOf", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")
COMPILING = 2  # threads
TRIAL_SECONDS = 2  # of processor time that compiling may take
TRIAL_BYTES = 4 << 30  # of memory addresses of a process that compiles, Python's own included
TRIED = 64  # grammars whose trial is remembered
REFUSED = "Grammar error: "
NO_OUTPUT = "no text can match it: a part of it matches nothing, or leads only back to itself"
WANTED_SCHEMA = """a JSON schema must be an object, such as {"type": "object"}"""
WANTED_CHOICE = "a choice must be a list of texts, at least one"
# Of Lark's grammars: texts, regular expressions and comments; and outside of these, what is about tokens.
QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|#).*')
TOKENS = re.compile(r"<[^>\s]*>|\b(?:max_tokens|temperature)\s*=")
LINES = re.compile(r"\n +\d+ \| ")  # of a grammar, as the library's reasons show them
FAULTY = re.compile(r" \d+ \| (\w+)[^\n]*\n +\^\n")  # the one that is wrong, with the name of its rule
AT = re.compile(r"^(?:at |line )?(\d+)(?:\(|, column )(\d+)\)?: ")  # a line and a column, as it says them, or as we do
SCHEMA_FAULT = "failed to compile JSON schema: "  # in the library's reasons
IMPOSSIBLE = re.compile("^Unsatisfiable schema: required property '(.*)' is unsatisfiable$")
DEFINITIONS, NO_SCHEMAS = ("$defs", "definitions"), ("const", "enum", "default", "examples", "required", "x-guidance")
SEARCH_SECONDS = 0.2  # of processor time in which the fault of a schema is looked for: each try reads all definitions
STACK = 2**28  # bytes of each that may be used
FORCED = 256  # letters that must follow, of those that are told
COMPILED = 64  # grammars that a compiler keeps, and
KEPT_SECONDS = 1.0  # of processor time that compiling them took: each has brought 100 to 230 MB
SHOWN = 40  # letters of an output that an error shows, and
REASON = 1000  # characters of the library's reason
# What a mask may take: about 15 ms. Without the state of the parser in error texts.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
CHUNK = 16  # letters that are consumed together, which keeps the interpreter; masks leave it to others
TOO_SLOW = 0.1  # seconds of processor time for these: a letter takes some µs; in very ambiguous grammars, up to 50 ms
SLOW = 0.01  # seconds of it for masks that somebody else should not wait for
MASKS = ThreadPoolExecutor(4, thread_name_prefix="grammar masks")
SLOW_MASKS = ThreadPoolExecutor(1, thread_name_prefix="slow grammar masks")
# The model decides how letters become tokens: else forced letters would be forced tokens, too, and its law another.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an output cannot go on by it; the text says why."""


class GrammarKind(StrEnum):
    """In what a grammar is written."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # a regular expression, as Rust's regex has it
    CHOICE = "choice"  # a JSON list of texts
    EBNF = "grammar"  # llguidance's variant of Lark, or GBNF


@dataclass(frozen=True)
class Grammar:
    """What an output must be; a stop string or `max_tokens` may still cut it.

    Raises ValueError: it is too long, or no text.
    """

    kind: GrammarKind | str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in [*GrammarKind]:
            raise ValueError(f"the kind of a grammar must be one of {', '.join(GrammarKind)}, got {self.kind!r}")
        object.__setattr__(self, "kind", GrammarKind(self.kind))
        if not isinstance(self.text, str):
            raise ValueError(f"a grammar ({self.kind}) must be a text, got {self.text!r}")
        if not self.text:
            raise ValueError(f"the grammar ({self.kind}) is empty: give at least one character, or no grammar")
        if len(self.text) > MAX_WHOLE or self._longest > MAX_LENGTH:
            raise ValueError(
                f"a grammar, or the schema of a tool, may have {MAX_LENGTH} characters, "
                f"and {MAX_WHOLE} with the schemas of all tools"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a grammar must be Unicode text: {error.reason} at character {error.start}") from None

    @property
    def _longest(self) -> int:
        """Characters of a part that the library follows by itself: by its own references only so deep."""
        lines = self.text.split("\n") if self.kind is GrammarKind.EBNF else []
        parts = [line.partition(SCHEMA)[2] for line in lines]
        schemas = [len(part) for part in parts if part.startswith("{") and part.endswith("}")]
        return max(len(self.text) - sum(schemas), *schemas, 0)

    @staticmethod
    def json(schema: str | dict[str, Any] | bool, **options: Any) -> "Grammar":
        """JSON by a schema, as text or plain values. `options` are llguidance's, such as `whitespace_flexible` false:
        no white space outside of texts."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        except TypeError as error:
            raise ValueError(f"{WANTED_SCHEMA}, got {schema!r}: {error}") from error
        return Grammar(GrammarKind.JSON, json.dumps(_schema(text) | {"x-guidance": options}) if options else text)

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """The whole output matches a regular expression."""
        return Grammar(GrammarKind.REGEX, pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> "Grammar":
        """The output is one of these."""
        choices = [texts] if isinstance(texts, str) else [*texts]
        if isinstance(texts, str) or not all(isinstance(text, str) for text in choices):
            raise ValueError(f"{WANTED_CHOICE}, got {texts!r}"[:200])
        return Grammar(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))

    @staticmethod
    def ebnf(text: str) -> "Grammar":
        """By a context-free grammar."""
        return Grammar(GrammarKind.EBNF, text)

    @property
    def source(self) -> str:
        """For the library; raises GrammarError."""
        try:
            return LLMatcher.grammar_from_lark(self._lark + OPTIONS)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from error

    def rule(self, name: str) -> str:
        """As a rule of this name in another grammar, in Lark; raises ValueError."""
        return re.sub(r"(?m)^\s*\??start\b", name, self._lark)

    @property
    def _lark(self) -> str:
        match self.kind:
            case GrammarKind.JSON:
                return f"start: %json {json.dumps(_schema(self.text))}"
            case GrammarKind.REGEX:
                return str(json.loads(LLMatcher.grammar_from_regex(self.text))["grammars"][0]["lark_grammar"])
            case GrammarKind.CHOICE:
                return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in _choices(self.text))
        try:  # only Lark's grammars begin with ?, where the library would read GBNF
            lark = self.text if self.text.lstrip().startswith("?") else str(any_to_lark(self.text))
        except Exception as error:  # the library raises a bare one, for a rule that is missing or no rule at all
            raise ValueError(f"read as GBNF: {error}") from error
        if found := TOKENS.search(QUOTED.sub("", lark)):
            raise ValueError(f"{found[0]} is not served: a grammar is over letters, and knows no tokens")
        return lark


def _schema(text: str) -> dict[str, Any]:
    schema = _parsed(text, WANTED_SCHEMA)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"{WANTED_SCHEMA}, got {text[:SHOWN]}")
    return schema


def _choices(text: str) -> list[str]:
    choices = _parsed(text, WANTED_CHOICE)
    if not (isinstance(choices, list) and choices and all(isinstance(text, str) for text in choices)):
        raise ValueError(f"{WANTED_CHOICE}, got {text[:SHOWN]}")
    return choices


def _parsed(text: str, wanted: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{wanted}, and {text[:SHOWN]!r} is not JSON: {error.msg} at character {error.pos}") from error


def _refused(reason: str, place: str = "", own: bool = False) -> GrammarError:
    """In one line, with the name of the rule in place of the lines of the grammar that the library shows. Without the
    line and column if its lines are our `own`, not the user's."""
    said, rule = LINES.split(reason, 1)[0].replace("<non-verbose/>", ""), FAULTY.search(reason)
    if rule is not None and rule[1] != "start":
        said = AT.sub(f"{rule[1]}: ", said)
    said = AT.sub("" if own else r"line \1, column \2: ", said)
    said = NO_OUTPUT if said.startswith("NoExtension") else said
    return GrammarError(REFUSED + " ".join(said.split())[:REASON] + (place and f", at {place}"))


class _Tokens:
    """What the library wants to know of a tokenizer: what it would write is never asked, as nothing is forced."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens, self.eos_token_id = tokens, len(tokens) - 1

    def __call__(self, text: str) -> list[int]:
        return []


class GrammarCompiler:
    """Compiles grammars for a model's columns. May be used by several threads, and not in an event loop.

    `letters`: of each column of the model's logits; none: for letters alone. `ends`: columns that end outputs.
    """

    def __init__(self, letters: Sequence[Letters] = (), ends: Collection[int] = ()) -> None:
        self.letters, self.ends = letters, frozenset(ends)
        self.bytes_at = -(-len(letters) // 8) * 8  # after the columns, and what fills up their last byte: all bytes
        # With the processor time that it took; the one used last is the last.
        self._compiled: OrderedDict[Grammar, Future[tuple[LLMatcher, float]]] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        # 0xFF, which is nowhere in UTF-8, begins what the library takes for a special token.
        columns = [to_bytes(one) if is_plain(one) and not one.startswith("\xff") else b"" for one in self.letters]
        padding = [b""] * (self.bytes_at - len(columns))
        every = [*columns, *padding, *(bytes([value]) for value in range(255)), b"", b""]
        return LLTokenizer(TokenizerWrapper(_Tokens(every)))

    def matcher(self, grammar: Grammar, ends: Collection[int] = ()) -> "GrammarMatcher":
        """Follows one output, which further columns may end, too. Raises GrammarError: it cannot be compiled."""
        with self._lock:  # who asks for it meanwhile waits for the same
            compiling = self._compiled.pop(grammar, None)
            compiling = compiling or _compiling().submit(_compile, self._tokenizer, grammar)
            self._compiled[grammar] = compiling
        try:
            compiled, _ = compiling.result()
        finally:
            self._forget()
        return GrammarMatcher(compiled.deep_copy(), self, self.ends.union(ends))

    def _forget(self) -> None:
        """Keeps no grammar that could not be compiled, and of the others the last ones."""
        with self._lock:
            ended = [(grammar, compiling) for grammar, compiling in self._compiled.items() if compiling.done()]
            seconds = 0.0
            for place, (grammar, compiling) in enumerate(reversed(ended)):
                seconds += 0.0 if compiling.exception() else compiling.result()[1]
                if compiling.exception() or (place and (place >= COMPILED or seconds > KEPT_SECONDS)):
                    del self._compiled[grammar]


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher, float]:
    source = grammar.source
    if reason := _tried(source):
        raise _refused(reason, own=grammar.kind is not GrammarKind.EBNF)
    began = thread_time()
    return _compiled(tokenizer, source), thread_time() - began


def _compiled(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    compiled = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not compiled.is_error():
        compiled.compute_bitmask()  # some limits are noticed only then
    if compiled.is_error():
        reason = compiled.get_error()
        raise _refused(reason, _place_of(source, reason))
    return compiled


def _place_of(source: str, reason: str) -> str:
    """Where in its schema the fault of a grammar is, which the library does not say: of parts of parts the last one
    that, with the definitions, has the same fault, or is the property that a fault names; and the only one of its keys
    without which it has not."""
    found = re.match(r"at (\d+)\((\d+)\): " + re.escape(SCHEMA_FAULT), reason)
    if found is None:
        return ""
    text = "".join(source.splitlines(keepends=True)[int(found[1]) - 1 :])
    try:
        part: Any = json.JSONDecoder().raw_decode(text[text.index("{", int(found[2]) - 1) :])[0]
    except (ValueError, RecursionError):  # the schema is none, or very deep
        return ""
    place, fault, until = "$", reason[found.end() :].partition("\n")[0], thread_time() + SEARCH_SECONDS
    own = {name: part[name] for name in DEFINITIONS if name in part}

    def fault_of(part: Any) -> str:
        if thread_time() > until:
            return ""
        schema = json.dumps(own | part if isinstance(part, dict) else part)
        said: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {schema}"))
        return said.partition(SCHEMA_FAULT)[2].partition("\n")[0]

    def below() -> Iterator[tuple[str, Any, str]]:
        impossible = IMPOSSIBLE.search(fault)
        named = impossible and _step("properties") + _step(impossible[1])
        for step, one in _parts_of(part):
            said = fault_of(one)
            if said and (said == fault or step == named):
                yield step, one, said

    while deeper := next(below(), None):
        place, part, fault = place + deeper[0], *deeper[1:]
    keys = part if isinstance(part, dict) else ()
    at_fault = [one for one in keys if fault_of({name: part[name] for name in keys if name != one}) != fault]
    return place + (_step(at_fault[0]) if len(at_fault) == 1 else "")


def _step(name: object) -> str:
    """In a path; a name with a dot or the like is quoted."""
    return f".{name}" if re.fullmatch(r"[\w$-]+", str(name)) else f"[{json.dumps(name, ensure_ascii=False)}]"


def _parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas in a schema, by their paths, definitions first."""
    named = schema if isinstance(schema, dict) else {}
    for name in sorted(named.keys() - {*NO_SCHEMAS}, key=lambda one: (one not in DEFINITIONS, [*named].index(one))):
        value, steps = named[name], list[tuple[Any, Any]]()
        if isinstance(value, list):
            steps = [*enumerate(value)]
        elif isinstance(value, dict) and name in (*DEFINITIONS, "properties", "patternProperties"):
            steps = [*value.items()]
        elif isinstance(value, dict):
            yield _step(name), value
        yield from ((_step(name) + _step(step), schema) for step, schema in steps)


TRIALS = local()  # `process`: that of a thread in which grammars are compiled for letters alone first


@lru_cache(TRIED)
def _tried(source: str) -> str:
    """Why a grammar cannot be compiled; empty: it can. Nothing else bounds what that takes, nor can it be stopped."""
    process: subprocess.Popen[bytes] | None = getattr(TRIALS, "process", None)
    if process is None:
        command = [sys.executable, "-c", "from crossdraft.text import grammar; grammar.try_grammars()"]
        pipe = subprocess.PIPE
        process = TRIALS.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        atexit.register(process.kill)
    said = b""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(source).encode() + b"\n")
        process.stdin.flush()
        said = process.stdout.readline()
    if said:
        reason: str = json.loads(said)
        return reason
    TRIALS.process = None
    process.stdin.close()
    process.stdout.close()
    most = f"{TRIAL_SECONDS} s of processor time" if process.wait() == -SIGXCPU else f"{TRIAL_BYTES >> 30} GiB"
    causes = [name for name in COSTLY if re.search(rf"\b{name}\b\W*\d", source)] or ["large numbers of repetitions"]
    return f"compiling it takes more than {most}: make it smaller; what costs may be {', '.join(causes)}"


def try_grammars() -> None:
    """What the processes run: for each line, a grammar, one that says why it cannot be compiled. Ends where that takes
    too much."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    stack_size(STACK)
    Thread(target=_try_lines).start()


def _try_lines() -> None:
    tokenizer = of_letters()._tokenizer
    for line in sys.stdin.buffer:
        most = ceil(process_time()) + TRIAL_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        reason = ""
        try:
            _compiled(tokenizer, json.loads(line))
        except GrammarError as error:
            reason = str(error).removeprefix(REFUSED)
        print(json.dumps(reason), flush=True)


@cache
def _compiling() -> ThreadPoolExecutor:
    """Threads with much room: the library follows references by recursion, and ends the process where there is none."""
    threads = ThreadPoolExecutor(COMPILING, "grammars")
    before, ready = stack_size(STACK), Barrier(COMPILING + 1)
    for _ in range(COMPILING):
        threads.submit(ready.wait)
    stack_size(before)
    ready.wait()
    return threads


@cache
def of_letters() -> GrammarCompiler:
    """The compiler that knows no columns: says whether a grammar can be compiled, and which letters it takes."""
    return GrammarCompiler()


class GrammarMatcher:
    """Where one output, and what may follow it, stand in a grammar. Its methods may be called from any thread.

    Where paths part a copy of the library's matcher goes on, and nothing is rolled back: one that has made a mask, is
    rolled back and consumes other letters makes wrong ones (llguidance 1.9.1).
    """

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler, ends: Collection[int]) -> None:
        self._start, self._compiler, self._lock = matcher, compiler, Lock()
        self._reached = matcher.deep_copy()  # has consumed `_text`, and makes no masks itself
        self._size = compiler.bytes_at // 8
        self._end_letters = {compiler.letters[column] for column in ends}
        self._ends = np.zeros(8 * self._size, dtype=np.bool_)
        self._ends[[*ends]] = True
        self._end_bits = np.packbits(self._ends, bitorder="little")
        self._text = NOTHING
        self._branch: LLMatcher | None = None  # a copy that goes on from there
        self._branched = NOTHING  # what it has consumed after the text
        self.slow = False  # whether the latest masks took long
        self._fault = ""  # why it is of no use any more

    def begin(self, text: Letters, paths: Sequence[Letters], must: bool = True) -> "Future[Bits]":
        """As `masks`, in a thread."""
        return (SLOW_MASKS if self.slow else MASKS).submit(self.masks, text, paths, must)

    def masks(self, text: Letters, paths: Sequence[Letters], must: bool = True) -> Bits:
        """Which columns may follow an output `text` with each of some paths after it.

        Where no column may, as after a path that does not fit the grammar itself, all but those that end outputs may:
        nothing that the target has drawn leads there. Raises GrammarError: no column may follow the text itself, and
        one `must`; or a limit of the library is exceeded.
        """
        with self._lock:
            began, found = thread_time(), {}
            self._branch, self._branched = None, NOTHING
            for path in sorted({*paths}):  # those that go on with one come next after it
                found[path] = self._mask(text, path)
            rows = [found[path] for path in paths]
            self.slow = thread_time() - began > SLOW
            if must and any(row is None and not path for row, path in zip(rows, paths, strict=True)):
                shown = to_bytes(text)[-SHOWN:].decode("utf-8", "replace")
                raise GrammarError(f"the grammar allows no token of this vocabulary after {shown!r}")
        return np.stack([~self._end_bits if row is None else row for row in rows])

    def fitting(self, text: Letters, following: Letters) -> Letters:
        """As much of what is to follow a text as fits the grammar, then letters that it leaves no choice about.

        Raises GrammarError: a limit of the library is exceeded.
        """
        with self._lock:
            began, fitting = thread_time(), NOTHING
            if is_plain(text) and self._reach(text):
                matcher = self._reached.deep_copy()
                taken = self._consumed(matcher, following)
                forced: str = matcher.compute_ff_bytes().decode("latin-1")
                fitting = Letters(following[:taken] + forced[:FORCED])
            self.slow = thread_time() - began > SLOW
            return fitting

    def _mask(self, text: Letters, path: Letters) -> Bits | None:
        """After a text and a path; None: no column may follow."""
        whole = Letters(text + path)
        plain = whole
        if not is_plain(whole):  # up to the first control symbol
            plain = Letters(whole[: next(at for at, letter in enumerate(whole) if ord(letter) >= FIRST_CONTROL)])
        following = Letters(plain[len(text) :])
        if self._branch is None or not following.startswith(self._branched):
            if not self._reach(Letters(plain[: len(text)])):
                return None
            self._branch, self._branched = self._reached.deep_copy(), NOTHING
        taken = self._consumed(self._branch, Letters(following[len(self._branched) :]))
        self._branched = Letters(following[: len(self._branched) + taken])
        if len(self._branched) < len(following):
            return None
        found = np.frombuffer(self._branch.compute_bitmask(), dtype=np.uint8)
        self._check(self._branch)
        end = self._compiler.bytes_at + 256  # the library's own end of sequence
        accepts = bool(found[end // 8] >> end % 8 & 1)
        if plain is not whole:
            return self._end_bits if accepts and whole[len(plain)] in self._end_letters else None
        row = found[: self._size] & ~self._end_bits
        if accepts:
            row |= self._end_bits
        return row if row.any() else None

    def _reach(self, text: Letters) -> bool:
        """Makes `_reached` have consumed a text; whether it could."""
        if not text.startswith(self._text):
            self._reached, self._text = self._start.deep_copy(), NOTHING
        more = Letters(text[len(self._text) :])
        taken = self._consumed(self._reached, more)
        self._text = Letters(self._text + more[:taken])
        return taken == len(more)

    def _consumed(self, matcher: LLMatcher, letters: Letters) -> int:
        """How many letters it could consume."""
        self._check(matcher)
        taken, first = 0, self._compiler.bytes_at
        while taken < len(letters):
            ids, began = [first + ord(letter) for letter in letters[taken : taken + CHUNK]], thread_time()
            count: int = matcher.try_consume_tokens(ids)
            taken += count
            self._check(matcher)
            if thread_time() - began > TOO_SLOW:
                self._fault = f"the grammar is too ambiguous: {CHUNK} letters take over {TOO_SLOW:g} s"
                self._check(matcher)
            if count < len(ids):
                break
        return taken

    def _check(self, matcher: LLMatcher) -> None:
        """Raises GrammarError if a limit has been exceeded."""
        if not self._fault and matcher.is_error():
            self._fault = str(_refused(matcher.get_error()))
        if self._fault:
            raise GrammarError(self._fault)
