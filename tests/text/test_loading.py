"""Tokenizers from a model's folder."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from crossdraft.text.letters import Side, to_bytes
from crossdraft.text.tokenizer_file import TokenizerMissing, load_tokenizer_json
from tests.text.kinds import Kind, kind


def _folder(path: Path, some: Kind, **configs: object) -> str:
    (path / "tokenizer.json").write_text(some.json, encoding="utf-8")
    for name, content in configs.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_of_several_end_symbols_those_with_a_usual_name_end_the_turn(tmp_path: Path) -> None:
    gpt2 = kind("gpt2")
    text, turn = gpt2.id_of("<|endoftext|>"), gpt2.id_of("<|im_end|>")
    folder = _folder(tmp_path, gpt2, generation_config={"eos_token_id": [turn, text]}, config={"eos_token_id": turn})
    loaded = load_tokenizer_json(folder)
    assert loaded.tokenizer_json == gpt2.json
    assert set(loaded.controls) == {(text, "END_OF_SEQUENCE"), (turn, "END_OF_TURN")}
    assert set(loaded.stops) == {text, turn}


CHAT = {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": CHAT, "config": {"eos_token_id": 0}},
        {"tokenizer_config": CHAT, "generation_config": {"eos_token_id": [0]}, "config": {"eos_token_id": None}},
        {"generation_config": {"eos_token_id": 0}, "config": {"text_config": {"eos_token_id": [1, -1, 99999]}}},
        {"generation_config": {"eos_token_id": [1, 99999]}, "config": {"eos_token_id": 0}},
    ],
)
def test_end_symbols_are_those_of_all_files(tmp_path: Path, files: dict[str, dict[str, object]]) -> None:
    """Ids 0 and 1 stand for the two end symbols; others are beyond the rows."""
    gpt2 = kind("gpt2")
    text, turn = gpt2.id_of("<|endoftext|>"), gpt2.id_of("<|im_end|>")
    written = json.dumps(files).replace("[1", f"[{turn}").replace("[0", f"[{text}").replace(": 0", f": {text}")
    named = json.loads(written)
    loaded = load_tokenizer_json(_folder(tmp_path, gpt2, **named))
    assert loaded.stops == tuple(sorted((text, turn)))
    assert dict(loaded.controls) == {text: "END_OF_SEQUENCE", turn: "END_OF_TURN"}


def test_beside_an_end_symbol_text_is_none(tmp_path: Path) -> None:
    """Such as id 2, which the configuration of a Llama names unless it is told better; alone it is believed."""
    gpt2 = kind("gpt2")
    assert load_tokenizer_json(_folder(tmp_path, gpt2, config={"eos_token_id": 2})).stops == (2,)
    better = _folder(tmp_path, gpt2, generation_config={"eos_token_id": gpt2.id_of("<|im_end|>")})
    assert load_tokenizer_json(better).stops == (gpt2.id_of("<|im_end|>"),)


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


def test_a_single_end_symbol_ends_the_sequence_whatever_its_name(tmp_path: Path) -> None:
    gpt2 = kind("gpt2")
    turn = gpt2.id_of("<|im_end|>")
    loaded = load_tokenizer_json(_folder(tmp_path, gpt2, config={"eos_token_id": turn}))
    assert loaded.controls == ((turn, "END_OF_SEQUENCE"),)


def test_the_tokenizers_own_config_names_begin_and_end(tmp_path: Path) -> None:
    llama2 = kind("llama2")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    loaded = load_tokenizer_json(_folder(tmp_path, llama2, tokenizer_config=config))
    begin, end = llama2.id_of("<s>"), llama2.id_of("</s>")
    assert loaded.controls == ((begin, "BEGIN_OF_SEQUENCE"), (end, "END_OF_SEQUENCE"))
    assert loaded.stops == (end,)


@pytest.mark.parametrize(
    ("folder", "files", "complaint"),
    [
        ("", (), "fast tokenizer"),
        ("", ("tokenizer.model",), "convert it once"),
        ("no/such", (), "neither a folder nor a hub id"),
    ],
)
def test_a_tokenizer_that_is_not_there(tmp_path: Path, folder: str, files: tuple[str, ...], complaint: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(TokenizerMissing, match=complaint):
        load_tokenizer_json(str(tmp_path / folder))


def test_a_symbol_that_begins_and_ends_is_an_end(tmp_path: Path) -> None:
    gpt2 = kind("gpt2")
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    loaded = load_tokenizer_json(_folder(tmp_path, gpt2, tokenizer_config=both))
    assert loaded.controls == ((gpt2.id_of("<|endoftext|>"), "END_OF_SEQUENCE"),)


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


@pytest.mark.parametrize(("text", "fault"), [("YQ== 0\n", "255 of the 256"), ("YQ==\n", "base64"), ("a 1\n", "base64")])
def test_damaged_ranks(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "some.tiktoken").write_text(text)
    with pytest.raises(ValueError, match=fault):
        load_tokenizer_json(str(tmp_path / "some.tiktoken"))
