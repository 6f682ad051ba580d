"""Chat templates, beside transformers' own rendering of them."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from crossdraft.text.chat_template import ChatTemplate, ChatTemplateError
from crossdraft.text.tokenizer_file import load_tokenizer_json
from tests.text.kinds import kind

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
    (tmp_path / "tokenizer.json").write_text(llama2.json, encoding="utf-8")
    settings = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
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
    (tmp_path / "tokenizer.json").write_text(kind("llama2").json, encoding="utf-8")
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    eos = {"content": "</s>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several, "eos_token": eos}))
    assert load_tokenizer_json(str(tmp_path)).chat_template == ChatTemplate("usual", (("eos_token", "</s>"),))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer_json(str(tmp_path)).chat_template == ChatTemplate("file", (("eos_token", "</s>"),))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer_json(str(tmp_path)).chat_template is None
