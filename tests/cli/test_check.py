"""`crossdraft check`: models are compared, refusals say why."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from crossdraft.cli import check
from crossdraft.engine import compatibility
from crossdraft.engine.attention import Window
from crossdraft.lab import models
from tests.cli.conftest import Cli
from tests.engine.test_loader import folder_of, rewritten
from tests.engine.tiny import tiny_llama

SHALLOW = "num_hidden_layers", 2  # of random models whose outputs are compared: with four it takes twice as long


def test_a_model_and_its_greedy_outputs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.RANDOM_SIZES, *SHALLOW)
    ended = cli("check", "random:mistral", "--drafter", "random:llama", "--json", "--markdown", tmp_path / "table.md")
    (found,) = json.loads(ended.out)
    assert (ended.code, found["outcome"]) == (0, "exact")
    assert found["outputs"] == dict.fromkeys(("plain", "lock-step", "overlapped"), check.ALL_TOKENS)
    assert found["judged"] > 0
    assert "| mistral | exact | 24 tokens |" in (tmp_path / "table.md").read_text()


def test_tables_for_people(cli: Cli) -> None:
    parts = ("1 exact, 0 differs, 0 refused, 0 not loaded", "a draft tree", "a reused prefix")
    cli("check", "random:llama").says(*parts, "cache 1,024 bytes a token")


def test_a_model_that_is_run_session_by_session(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a drafter of the same kind, whose drafts are right."""
    monkeypatch.setitem(models.RANDOM_SIZES, *SHALLOW)
    shown = cli("check", "random:mamba", "--drafter", "random:mamba")
    shown.says("1 exact, 0 differs", ", ".join(3 * [str(check.ALL_TOKENS)]), "cache 0 bytes a token")
    shown.says("run one after another, and none begins with a prefix of another one: this model does not keep")
    assert "a reused prefix" not in shown.out


def test_a_drafter_that_is_run_session_by_session(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.RANDOM_SIZES, *SHALLOW)
    (found,) = json.loads(cli("check", "random:llama", "--drafter", "random:mamba", "--json").out)
    assert found["outputs"] == dict.fromkeys(("plain", "lock-step", "overlapped"), check.ALL_TOKENS)
    assert found["judged"] > 0


def test_what_is_refused_or_cannot_be_loaded(cli: Cli, tmp_path: Path) -> None:
    refused = "random:bert refused: this model does not keep keys and values"
    cli("check", "random:bert", "random:llama").says("1 exact, 0 differs, 1 refused, 0 not loaded", err=refused, code=1)
    assert cli("check", "random:nosuch").err.endswith("of nosuch: transformers has no such architecture\n")
    unknown = "there is no bundled model 'bundled:nothing'"
    cli("check", "bundled:nothing").says("0 exact, 0 differs, 0 refused, 1 not loaded", err=unknown, code=1)
    cli("check", "random:llama", "--device", "abacus").failed("--device must be auto, cpu or a device that torch")
    cli("check", "random:llama", "--markdown", tmp_path / "none" / "table.md").failed("cannot write")


@pytest.mark.parametrize("more", [(), ("--drafter", "random:llama")])
def test_a_tokenizer_that_no_service_takes_is_refused_with_its_words(cli: Cli, tmp_path: Path, more) -> None:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "<end>": 3}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tiny_llama(eos_token_id=3).save_pretrained(tmp_path)
    said = "a WordPiece tokenizer is not supported; use one with a BPE or Unigram model"
    ended = cli("check", str(tmp_path), *more)
    ended.says("0 exact, 0 differs, 1 refused, 0 not loaded", err=f"{tmp_path} refused: {said}", code=1)
    cli("serve", "target", "--model", str(tmp_path), "--port", "0").failed(said, 1)


def test_a_checkpoint_that_lacks_tensors_is_not_loaded(cli: Cli, tmp_path: Path) -> None:
    rewritten(folder_of(tmp_path), lambda tensors: {name: tensors[name] for name in tensors if "lm_head" not in name})
    lacks = "the checkpoint lacks lm_head.weight"
    cli("check", str(tmp_path)).says("0 exact, 0 differs, 0 refused, 1 not loaded", err=lacks, code=1)


def test_what_differs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "window_of", lambda *_: Window(23))
    cli("check", "random:mistral").says("differs", err="random:mistral differs: a prompt by", code=1)


def test_every_architecture(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are refused, or have no small random model, are no failure."""
    monkeypatch.setattr(models, "architectures", lambda: ["llama", "bert", "no such model"])
    cli("check", "random:all").says("1 exact, 0 differs, 1 refused, 1 not loaded")
