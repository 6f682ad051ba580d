"""What a model's folder says: its tokenizer, symbols and settings; chat templates, beside transformers' rendering."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import PreTrainedTokenizerFast

from crossdraft.text.chat_template import ChatTemplate, ChatTemplateError
from crossdraft.text.letters import Side, to_bytes
from crossdraft.text.tokenizer_file import TokenizerMissing, load_tokenizer_json
from tests.text.kinds import PANICS, Kind, kind


def _folder(path: Path, some: Kind, **configs: object) -> str:
    (path / "tokenizer.json").write_text(some.json, encoding="utf-8")
    for name, content in configs.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(path)


BEGIN, END, TURN = "BEGIN_OF_SEQUENCE", "END_OF_SEQUENCE", "END_OF_TURN"
CHAT, NONE, TEXT, BOTH = {"eos_token": "<|im_end|>"}, {"eos_token_id": None}, "<|endoftext|>", {0: END, 1: TURN}


@pytest.mark.parametrize(
    ("files", "roles"),
    [
        # Those of all files: of several the one with a usual name ends the turn.
        ({"generation_config": {"eos_token_id": [1, 0]}, "config": {"eos_token_id": 1}}, BOTH),
        ({"tokenizer_config": CHAT, "config": {"eos_token_id": 0}}, BOTH),
        ({"tokenizer_config": CHAT, "generation_config": {"eos_token_id": [0]}, "config": NONE}, BOTH),
        ({"generation_config": {"eos_token_id": 0}, "config": {"text_config": {"eos_token_id": [1, -1, 9**6]}}}, BOTH),
        ({"generation_config": {"eos_token_id": [1, 9**6]}, "config": {"eos_token_id": 0}}, BOTH),
        # A single one ends the sequence, whatever its name.
        ({"config": {"eos_token_id": 1}}, {1: END}),
        # Text is none beside it, such as id 2, which the configuration of a Llama names unless it is told better.
        ({"config": {"eos_token_id": 2}}, {2: END}),
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 2}}, {1: END}),
        # One that begins and ends is an end.
        ({"tokenizer_config": {"bos_token": TEXT, "eos_token": TEXT}}, {0: END}),
        ({"tokenizer_config": CHAT | {"bos_token": {"content": TEXT}, "pad_token": None}}, {0: BEGIN, 1: END}),
    ],
)
def test_symbols_that_begin_and_end(tmp_path: Path, files: dict[str, Any], roles: dict[int, str]) -> None:
    """Ids 0 and 1 stand for the two end symbols; others are text, or beyond the rows."""
    gpt2 = kind("gpt2")
    meant = {0: gpt2.id_of("<|endoftext|>"), 1: gpt2.id_of("<|im_end|>")}

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: named(one) for name, one in value.items()}
        return [*map(named, value)] if isinstance(value, list) else meant.get(value, value)

    loaded = load_tokenizer_json(_folder(tmp_path, gpt2, **named(files)))
    assert loaded.tokenizer_json == gpt2.json
    assert dict(loaded.controls) == {named(token): role for token, role in roles.items()}
    assert loaded.stops == tuple(sorted(named(token) for token, role in roles.items() if role != BEGIN))


def test_symbols_beyond_the_rows_have_no_role(tmp_path: Path) -> None:
    gpt2 = kind("gpt2")
    first = min(map(gpt2.id_of, ("<|endoftext|>", "<|im_end|>")))
    both = CHAT | {"bos_token": "<|endoftext|>"}
    loaded = load_tokenizer_json(_folder(tmp_path, gpt2, tokenizer_config=both, config={"vocab_size": first}))
    assert loaded.controls == loaded.stops == ()
    assert loaded.tokenization(Side.TARGET).vocabulary.size == first


def test_sampling_settings_are_the_models_own_or_none_or_those_of_another_folder(tmp_path: Path) -> None:
    """The end symbols of the model's own file count also without its settings, as in vLLM."""
    gpt2 = kind("gpt2")
    end = gpt2.id_of("<|im_end|>")
    own, other = {"eos_token_id": end, "temperature": 0.5}, {"temperature": 0.25}
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    model = _folder(tmp_path / "model", gpt2, generation_config=own)
    elsewhere = _folder(tmp_path / "other", gpt2, generation_config=other)
    found = {given: load_tokenizer_json(model, None, given) for given in ("auto", "vllm", elsewhere)}
    assert [loaded.generation for loaded in found.values()] == [own, {}, other]
    assert found["auto"].stops == found["vllm"].stops == (end,)
    with pytest.raises(ValueError, match=r"has no generation_config\.json"):
        load_tokenizer_json(model, None, str(tmp_path))


@pytest.mark.parametrize(
    ("folder", "files", "complaint"),
    [
        ("", "x", "fast tokenizer"),
        ("", "tokenizer.model", "convert it once"),
        ("no/such", "x", "neither a folder nor a hub id"),
    ],
)
def test_a_tokenizer_that_is_not_there(tmp_path: Path, folder: str, files: str, complaint: str) -> None:
    (tmp_path / files).write_bytes(b"")
    with pytest.raises(TokenizerMissing, match=complaint):
        load_tokenizer_json(str(tmp_path / folder))


def test_without_a_network_the_cache_of_the_hub_is_used_and_nothing_waits(tmp_path: Path, monkeypatch) -> None:
    """Of a model that is there a file that is not there is one that the model has not."""
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", "http://127.0.0.1:1"), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", pytest.fail)
    with pytest.raises(TokenizerMissing, match="neither a folder nor in the local cache"):
        load_tokenizer_json("some/model")
    cached = tmp_path / "models--some--model"
    (cached / "snapshots/0123").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123")
    _folder(cached / "snapshots/0123", kind("gpt2"), config={})
    assert load_tokenizer_json("some/model").tokenizer_json == kind("gpt2").json


def test_a_file_of_ranks_is_the_tokenizer_that_it_was_written_from(tmp_path: Path) -> None:
    """The ids of a byte-level tokenizer, in base64 with their ranks, encode words as it does."""
    gpt2 = kind("gpt2")
    model = json.loads(gpt2.json)["model"]
    own = gpt2.tokenization(Side.TARGET)
    merged = [left + right for left, right in (one.split() if isinstance(one, str) else one for one in model["merges"])]
    letters = {piece: to_bytes(own.vocabulary.letters[token]) for piece, token in model["vocab"].items()}
    order = [piece for piece in model["vocab"] if len(letters[piece]) == 1] + merged
    ranks = {letters[piece]: rank for rank, piece in enumerate(dict.fromkeys(order))}
    path = tmp_path / "gpt2.tiktoken"
    path.write_text("".join(f"{b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    loaded = load_tokenizer_json(str(path))
    found = loaded.tokenization(Side.TARGET)
    assert (loaded.controls, loaded.stops, found.vocabulary.size) == ((), (), len(ranks))
    for text in ("def", " return", "import", "12", " the"):
        written = [to_bytes(found.vocabulary.letters[token]) for token in found.encode_prompt(text)]
        assert written == [to_bytes(own.vocabulary.letters[token]) for token in own.encode_prompt(text)], text
    (tmp_path / "some.json").write_text(gpt2.json)
    assert load_tokenizer_json(str(tmp_path / "some.json")).tokenizer_json == gpt2.json


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("some.tiktoken", "YQ== 0\n", "255 of the 256"),
        ("some.tiktoken", "YQ==\n", "base64"),
        ("some.tiktoken", "a 1\n", "base64"),
        ("tokenizer.json", PANICS[0], r"tokenizer\.json is not a tokenizer: .*; write it again"),
    ],
)
def test_a_damaged_file(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=fault):
        load_tokenizer_json(str(tmp_path / name))


CHATS = [
    [{"role": "user", "content": "Hi <b>&</b> \"there\" 'x'\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": " Two. "},
        {"role": "user", "content": "Größe 🦄 {{ not jinja }}"},
    ],
]
# In the shapes of published ones.
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.' + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if strftime_now is defined %}{%- set year = strftime_now("%Y") %}{%- else %}{%- set year = "none" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nIn " + year + ": " + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}tools{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
BLOCKS = """{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
  {{ ns.count }}: {{ message | tojson }} {{ message.content | tojson(false, 2) }}
    {% generation %}
    said{{ eos_token }}
    {% endgeneration %}
{% endfor %}
{{ dict(a=1) | tojson }}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [CHATML, HEADERS, BLOCKS])
def test_it_renders_as_transformers_does(source: str, messages: list[dict[str, str]], tmp_path: Path) -> None:
    llama2 = kind("llama2")
    settings = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source}
    reference = PreTrainedTokenizerFast.from_pretrained(_folder(tmp_path, llama2, tokenizer_config=settings))
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    template = load_tokenizer_json(str(tmp_path)).chat_template
    assert template == ChatTemplate(source, tuple(sorted(TOKENS.items())))
    assert template.render(messages) == expected
    ids = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(llama2.tokenization().encode_prompt(expected, special=False)) == ids


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__init__=1) }}", "underscore"),
        ("{{ dict.__globals__.json }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "too big"),
    ],
)
def test_what_a_template_cannot_do_is_an_error(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(source).render(CHATS[0])


def test_a_file_of_its_own_comes_first_and_of_several_the_default(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    eos = {"content": "</s>", "special": True}
    _folder(tmp_path, kind("llama2"), tokenizer_config={"chat_template": several, "eos_token": eos})
    assert load_tokenizer_json(str(tmp_path)).chat_template == ChatTemplate("usual", (("eos_token", "</s>"),))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer_json(str(tmp_path)).chat_template == ChatTemplate("file", (("eos_token", "</s>"),))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer_json(str(tmp_path)).chat_template is None
