"""`crossdraft serve target`, `drafter` and `ngram` as processes, with TLS and without, and what they refuse."""

import asyncio
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from crossdraft.text.letters import Letters
from crossdraft.types.messages import Draft, OpenDrafter, SamplingOptions
from tests.cli.conftest import COMMAND, Cli, serving
from tests.rpc.sessions import DrafterClient

GREEDY = ["once upon", "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json"]


@pytest.fixture
def tls(cli: Cli, tmp_path: Path) -> tuple[str, ...]:
    """The options of a side whose certificate is for this machine."""
    folder = tmp_path / "certs"
    assert cli("certs", folder, "--host", "local,127.0.0.1").code == 0
    names = {"--tls-ca": "ca.pem", "--tls-cert": "local.pem", "--tls-key": "local.key"}
    return tuple(text for option, name in names.items() for text in (option, str(folder / name)))


def test_a_pair_of_processes_from_their_ready_lines_to_their_ends(
    cli: Cli, tls: tuple[str, ...], target: str, target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    """With TLS, and with options of every kind."""
    (tmp_path / "text.txt").write_text("The quick brown fox\n")
    counted = tmp_path / "frequencies"
    assert cli("frequencies", "--model", drafter_folder, tmp_path / "text.txt", "-o", counted).code == 0
    shaped = ("--max-model-len", "100", "--dtype", "float32", "--enforce-eager")
    emulated = ("--pace", "1,0.25", "--logit-noise", "0.5")
    pruned = ("--vocab-keep", "20", "--frequencies", str(counted))
    with (
        serving("target", target_folder, *shaped, *tls) as (one, safe),
        serving("drafter", drafter_folder, *emulated, *pruned, "--until-stdin-ends", *tls) as (other, helping),
    ):
        assert (safe["ready"], safe["role"], safe["model"]) == (True, "target", str(target_folder))
        assert not {"paced", "logit_noise"} & safe.keys()
        assert (helping["paced"], helping["logit_noise"]) == ("1,0.25", 0.5)
        generated_over_tls(cli, tls, target, safe["address"], helping["address"])
        other.communicate(timeout=120)  # closes its standard input, as the kernel does for a process that was killed
        assert other.returncode == 0
        one.send_signal(signal.SIGTERM)
        assert one.communicate(timeout=120) == ("", "")
        assert one.returncode == 0


def generated_over_tls(cli: Cli, tls: tuple[str, ...], target: str, safe: str, drafter: str) -> None:
    """The output is that of a target without TLS, and clients without a certificate are refused."""
    where = ["--target", safe, "--drafter", drafter, "--untrusted-drafter"]
    plain = cli("generate", *GREEDY, "--target", target)
    secured = cli("generate", *GREEDY, *where, *tls, "--overlap", "off")
    assert secured.err == ""
    assert secured.records[-1]["text"] == plain.records[-1]["text"] != ""
    assert secured.records[-1]["statistics"]["method"] == "slem"
    assert secured.records[-1]["statistics"]["draft_tokens"] > 0
    refused = cli("generate", *GREEDY, *where, *tls, "--method", "coupled")
    assert refused.code == 2
    assert "this drafter is not trusted; use 'slem' or 'seeded'" in refused.err
    cli("generate", *where, *tls, 200 * "The quick ").failed("maximum context length is 100 tokens")
    outside = cli("generate", *GREEDY, "--target", safe)
    outside.failed("if it speaks TLS, it takes only clients with a valid certificate of its CA", 1)
    mistaken = cli("generate", *GREEDY, "--target", target, *tls)
    assert mistaken.code == 1
    assert f"target at {target}: it does not speak TLS" in mistaken.err


@pytest.mark.parametrize("given", [["mine"], ["=folder"], ["one=a", "--lora-modules", "two=b"]])
def test_adapters_that_cannot_be_served(cli: Cli, given: list[str]) -> None:
    for role in ("target", "drafter"):
        cli("serve", role, "--model", "no-model", "--lora-modules", *given).failed("takes one adapter, as NAME=PATH")


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_that_is_taken_is_found_before_a_model_is_loaded(cli: Cli, target: str, option: str) -> None:
    port = target.rpartition(":")[2]
    for server in (["ngram"], ["target", "--model", "no-model"], ["drafter", "--model", "no-model"]):
        ended = cli("serve", *server, option, port)
        ended.failed(f"crossdraft: cannot listen on {target}: Address already in use; choose another port", 1)
        assert ended.err.count("\n") == 1


def test_ports_of_one_command_differ(cli: Cli) -> None:
    own = ("--target-model", "bundled:target", "--drafter-model", "bundled:drafter-a", "--port", "17471")
    for server, flag in (
        (("target", "--model", "bundled:target", "--port", "17471"), "--metrics-port"),
        (("http", *own), "--grpc-port"),
        (("http", *own), "--target-port"),
        (("http", *own, "--workers", "2"), "--grpc-port"),
        (("grpc", *own), "--drafter-port"),
        (("grpc", *own, "--workers", "2"), "--metrics-port"),
    ):
        ended = cli("serve", *server, flag, "17471")
        assert (ended.code, "are both 17471: give each a port of its own" in ended.err) == (2, True), ended.err
        assert flag in ended.err
        assert "loading" not in ended.err


def test_a_port_that_is_taken_is_found_before_an_api_looks_for_targets(cli: Cli, target: str) -> None:
    port, needed = target.rpartition(":")[2], ("--model", "toy", "--target", "127.0.0.1:9")
    for server in (
        ["http"],
        ["http", "--port", "0", "--grpc-port"],
        ["grpc"],
        ["grpc", "--port", "0", "--metrics-port"],
        ["grpc", "--workers", "2", "--port", "0", "--metrics-port"],
    ):
        given = [*server, port] if len(server) > 1 else [*server, "--port", port]
        ended = cli("serve", *given, *needed)
        ended.failed(f"crossdraft: cannot listen on {target}: Address already in use", 1)
        assert ended.err.count("\n") == 1


def test_an_ngram_drafter_needs_no_model_and_warns_of_an_open_port_once() -> None:
    async def drafted(address: str) -> str:
        async with DrafterClient(address) as client:
            assert (await client.describe()).copies
            opening = OpenDrafter(Letters("one two one t"), SamplingOptions(), None, 0)
            async with client.session(opening) as session:
                return (await session.draft(Draft(1, 0, Letters(""), 4))).reason

    lengths = ("--min-ngram", "5", "--max-ngram", "6", "--grace-seconds", "0")
    command = [*COMMAND, "serve", "ngram", "--host", "0.0.0.0", *lengths]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        ready = json.loads(process.stdout.readline())
        assert (ready["role"], ready["model"]) == ("drafter", "ngram")
        assert asyncio.run(drafted(f"127.0.0.1:{ready['address'].rpartition(':')[2]}")) == ""
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert err.startswith(f"crossdraft: {ready['address']} is open to whoever can reach it, unencrypted")
    assert err.count("is open to") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["ngram", "--max-ngram", "3"], "min_ngram, 4, must not be above max_ngram, 3"),
        (["ngram", "--max-sessions", "4", "--max-sessions-per-peer", "5"], "between 1 and max_sessions (4), got 5"),
        (["ngram", "--model", "x"], "No such option: --model"),
        (["target", "--model", "x", "--model", "y"], "--model was given 2 times (x, y), and a server has one model"),
        (["target", "--model", "x", "--affinity", "y"], "No such option: --affinity"),
        (["target", "--model", "x", "--chat-template", "/no"], "cannot read --chat-template /no: No such file"),
        (["target", "--model", "x", "--logit-noise", "1"], "No such option: --logit-noise"),
    ],
)
def test_options_of_another_service_or_out_of_range(cli: Cli, options: list[str], complaint: str) -> None:
    cli("serve", *options).failed(complaint)


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (["--host", ""], 2, "host must not be empty"),
        (["--override-generation-config", "{"], 2, "override_generation_config {: Expecting property name"),
        (["--override-generation-config", "[]"], 2, "it must be an object with some of temperature, top_k"),
        (["--override-generation-config", '{"top_q": 1}'], 2, "it must be an object with some of temperature, top_k"),
        (["--override-generation-config", '{"top_p": 2}'], 2, "top_p must be above 0 and at most 1, got 2"),
        (["--generation-config", "."], 1, "has no generation_config.json: name another folder, auto or vllm"),
        (["--pace", "20"], 2, "a pace is A,B, two numbers of milliseconds such as 20,0.5, got 20"),
        (["--pace", "-1,0"], 2, "a pace needs two numbers of milliseconds, 0 or more, got -1,0"),
        (["--dtype", "int3"], 2, "--dtype must be auto, float32, bfloat16 or float16, got int3"),
        (["--device", "abacus"], 2, "--device must be auto, cpu or a device that torch sees here, got abacus"),
        (["--max-model-len", "1000"], 2, "the model's context, 128, got 1000"),
        (["--model", "./nowhere"], 1, "there is no folder ./nowhere"),
        (["--model", "bundled:nothing"], 1, "there is no bundled model 'bundled:nothing'"),
    ],
)
def test_options_that_cannot_be(cli: Cli, target_folder: Path, options: list[str], code: int, complaint: str) -> None:
    model = () if "--model" in options else ("--model", target_folder)
    ended = cli("serve", "target", *model, *options)
    ended.failed(complaint, code)
    assert ended.err.splitlines()[-1].startswith(("crossdraft: ", "Error: "))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is damaged, it is not JSON"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer"),
        ({"config.json": "[]"}, "config.json is damaged, it is not a JSON object"),
        ({"config.json": json.dumps({"model_type": "abacus"})}, "cannot be loaded as a causal language model"),
    ],
)
def test_folders_that_are_damaged(cli, target_folder, tmp_path, damage, complaint):
    folder = tmp_path / "model"
    shutil.copytree(target_folder, folder)
    for name, content in damage.items():
        (folder / name).write_text(content)
    ended = cli("serve", "target", "--model", folder)
    ended.failed(complaint, 1)
    assert ended.err.startswith(f"crossdraft: loading {folder}\ncrossdraft: ")
    assert ended.err.count("\n") == 2
