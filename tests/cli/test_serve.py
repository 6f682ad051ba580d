"""`crossdraft serve` as processes, with TLS and without: services, and the APIs over them; and what is refused."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers import AutoTokenizer

from crossdraft.cli import serve
from crossdraft.config.engine import OwnModels
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.serving.backend import LocalModel, LocalOptions
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Draft, OpenDrafter, SamplingOptions
from tests.cli.conftest import Cli, lacking, metric, serving
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import save
from tests.text.kinds import kind

GREEDY = ["once upon", "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json"]
OF_HELM = str(Path(__file__).parents[2] / "deploy/kubernetes/templates/_helpers.tpl")  # no template of a chat


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
    usual = ("--threads", 1, "--grace-seconds", 0, "--log-level", "warning", *tls)
    shaped = ("--max-model-len", "100", "--dtype", "float32", "--enforce-eager")
    own = ("--pace", "1,0.25", "--logit-noise", "0.5", "--vocab-keep", "20", "--frequencies", counted)
    with (
        serving("target", "--model", target_folder, *usual, *shaped) as (one, safe),
        serving("drafter", "--model", drafter_folder, *usual, *own, "--until-stdin-ends") as (other, helping),
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
    refused.failed("this drafter is not trusted; use 'slem' or 'seeded'")
    cli("generate", *where, *tls, 200 * "The quick ").failed("maximum context length is 100 tokens")
    outside = cli("generate", *GREEDY, "--target", safe)
    outside.failed("if it speaks TLS, it takes only clients with a valid certificate of its CA", 1)
    mistaken = cli("generate", *GREEDY, "--target", target, *tls)
    mistaken.failed(f"target at {target}: it does not speak TLS", 1)


def test_a_host_that_nothing_is_called_is_found_before_a_model_is_loaded(cli: Cli) -> None:
    for server in ("ngram", "target --model no-model", "http --target-model no-model", "grpc --target 127.0.0.1:9"):
        ended = cli("serve", *server.split(), "--host", "nosuch.invalid", "--port", "0")
        ended.failed("crossdraft: cannot listen on nosuch.invalid:0: ", 1)


API = "--model toy --target 127.0.0.1:9"


@pytest.mark.parametrize(
    "words",
    [
        *(f"{server} {option}" for option in ("--port", "--metrics-port") for server in ("ngram", "target --model no")),
        *(f"drafter --model no {option}" for option in ("--port", "--metrics-port")),
        *(f"http {API} --port", f"http {API} --port 0 --grpc-port", f"grpc {API} --port"),
        *(f"grpc {API} {more} --port 0 --metrics-port" for more in ("", "--workers 2")),
    ],
)
def test_a_port_that_is_taken_is_found_before_a_model_is_loaded_or_a_target_is_looked_for(cli, target, words):
    complaint = f"crossdraft: cannot listen on {target}: Address already in use; choose another port"
    cli("serve", *words.split(), target.rpartition(":")[2]).failed(complaint, 1, lines=1)


def test_ports_of_one_command_differ(cli: Cli) -> None:
    own = ("--target-model", "bundled:target", "--drafter-model", "bundled:drafter-a", "--port", "17471")
    for server, flag in (
        (("target", "--model", "bundled:target", *own[-2:]), "--metrics-port"),
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


def test_an_ngram_drafter_needs_no_model_and_warns_of_an_open_port_once() -> None:
    async def drafted(address: str) -> str:
        async with DrafterClient(address) as client:
            assert (await client.describe()).copies
            opening = OpenDrafter(Letters("one two one t"), SamplingOptions(), None, 0)
            async with client.session(opening) as session:
                return (await session.draft(Draft(1, 0, Letters(""), 4))).reason

    lengths = ("--min-ngram", 5, "--max-ngram", 6)
    with serving("ngram", "--host", "0.0.0.0", *lengths, "--grace-seconds", 0) as (process, ready):
        assert (ready["role"], ready["model"]) == ("drafter", "ngram")
        assert asyncio.run(drafted(f"127.0.0.1:{ready['address'].rpartition(':')[2]}")) == ""
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert err.startswith(f"crossdraft: {ready['address']} is open to whoever can reach it, unencrypted")
    assert err.count("is open to") == 1


API_HERE = ("http", "--port", "0", "--target", "127.0.0.1:9", "--model", "tiny")
OUT_OF_RANGE = (
    (["--target", "nowhere"], "--target must be HOST:PORT"),
    (["--drafter", "127.0.0.1:9"], "--drafter must be NAME=HOST:PORT"),
    (["--drafter", "a=127.0.0.1"], "--drafter must be HOST:PORT"),
    (["--drafter", "a=127.0.0.1:9", "--drafter", "a=127.0.0.1:8"], "have the same name"),
    (["--drafter", "auto=127.0.0.1:9"], "crossdraft: a drafter needs a name: 'auto' stands for the fastest"),
    (["--drafter", "none", "--drafter", "a=127.0.0.1:8"], "--drafter none is no drafter: leave out the others, or"),
    (["--model", "large"], "--model was given 2 times (tiny, large), and a server has one model"),
    (["--untrusted-drafter", "b"], "--untrusted-drafter names 'b', but no --drafter has that name"),
    (["--api-keys", "/nowhere/keys"], "cannot read the API keys"),
)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["ngram", "--max-ngram", "3"], "min_ngram, 4, must not be above max_ngram, 3"),
        (["ngram", "--max-sessions", "4", "--max-sessions-per-peer", "5"], "between 1 and max_sessions (4), got 5"),
        (["ngram", "--model", "x"], "No such option: --model"),
        (["target", "--model", "x", "--model", "y"], "--model was given 2 times (x, y), and a server has one model"),
        (["target", "--model", "x", "--affinity", "y"], "No such option: --affinity"),
        (["target", "--model", "x", "--chat-template", "/no"], "cannot read --chat-template /no: No such file"),
        (["target", "--model", "x", "--chat-template", OF_HELM], f"--chat-template {OF_HELM}, line 1: unexpected '/'"),
        (["target", "--model", "x", "--logit-noise", "1"], "No such option: --logit-noise"),
        *(
            ([role, "--model", "bundled:chat", "--lora-modules", *given.split()], "takes one adapter, as NAME")
            for given in ("mine", "=folder", "one=a --lora-modules two=b")
            for role in ("target", "drafter")
        ),
        *(([*API_HERE, *options], complaint) for options, complaint in OUT_OF_RANGE),
    ],
)
def test_options_of_another_service_or_out_of_range(cli: Cli, options: list[str], complaint: str) -> None:
    cli("serve", *options).failed(complaint, lines=1 if options[0] == "http" else None)


def test_a_chat_template_that_is_nested_too_deeply_is_refused(cli: Cli, tmp_path: Path) -> None:
    (template := tmp_path / "deep.jinja").write_text("{% if a %}" * 200 + "{% endif %}" * 200)
    cli("serve", "target", "--model", "x", "--chat-template", template).failed(f"--chat-template {template}")


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (["--host", ""], 2, "host must not be empty"),
        (["--override-generation-config", "{"], 2, "--override-generation-config {: Expecting property name"),
        (["--override-generation-config", "[" * 50_000], 2, "maximum recursion depth exceeded"),
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
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged, it is not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("config.json", "[]", "config.json is damaged, it is not a JSON object"),
        ("config.json", json.dumps({"model_type": "abacus"}), "cannot be loaded as a causal language model"),
    ],
)
def test_folders_that_are_damaged(cli, target_folder, tmp_path, name, content, complaint):
    folder = tmp_path / "model"
    shutil.copytree(target_folder, folder)
    (folder / name).write_text(content)
    ended = cli("serve", "target", "--model", folder)
    ended.failed(complaint, 1, lines=2)
    assert ended.err.startswith(f"crossdraft: loading {folder}\ncrossdraft: ")


KEY = "alice-0123456789abcdef"
PROMPT = "The quick brown"
SHORT = ("--max-tokens", "12", "--ignore-eos", "--temperature", "0", "--overlap", "off", PROMPT)
BODY = {"model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
Pair = tuple[str, ...]


@contextmanager
def api(kind: str, pair: Pair, *options: object) -> Iterator[dict[str, Any]]:
    """The ready line of a server that uses the pair; it is ended with the block, and must end well and quietly."""
    _, target, _, drafter = pair
    where = ("--target", target, "--drafter", f"small={drafter}", "--model", "toy")
    with serving(kind, "--port", 0, *where, "--grace-seconds", 0, *options) as (_, ready):
        yield ready


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"alice {KEY}\n")
    return path


@pytest.fixture(scope="module")
def ready(pair: Pair, keys: Path) -> Iterator[dict[str, Any]]:
    """Of a gRPC server with a key and metrics."""
    with api("grpc", pair, "--api-keys", keys, "--metrics-port", 0) as ready:
        assert (ready["role"], ready["models"]) == ("generation", ["toy"])
        yield ready


@pytest.fixture
def server(ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address, for those who have the key."""
    monkeypatch.setenv("CROSSDRAFT_API_KEY", KEY)
    return str(ready["address"])


@pytest.mark.parametrize("options", [("--drafter", "small", "--model", "toy"), ("--seed", "3")])
def test_the_same_as_without_a_server(cli: Cli, pair: Pair, server: str, options: tuple[str, ...]) -> None:
    local = cli("generate", *pair, "--json", *(options if "--seed" in options else ()), *SHORT)
    remote = cli("generate", "--server", server, "--json", *options, *SHORT)
    assert (remote.code, remote.err) == (0, "")
    assert remote.records[:-1] == local.records[:-1]
    ours, theirs = remote.records[-1], local.records[-1]
    assert all(ours[name] == theirs[name] for name in ("text", "ids", "reason"))
    ours, theirs = ours["statistics"], theirs["statistics"]
    assert set(ours) == set(theirs)
    assert all(ours[name] == theirs[name] for name in ("method", "num_speculative_tokens", "accepted", "passes"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--model", "other"), "there is no model 'other'; there is toy"),
        (("--drafter", "other"), "'toy' has no drafter 'other'; there is small"),
        (("--method", "standard"), "method 'standard' needs a drafter with the target's vocabulary"),
        (("--api-key", "a b"), "an API key has visible ASCII characters only, and no spaces; check --api-key"),
        (("--record", "file"), "record is not for a server: leave it out (--record)"),
        (("--target", "127.0.0.1:1"), "a server has its own targets"),
    ],
)
def test_what_cannot_be_asked_for(cli: Cli, server: str, options: tuple[str, ...], complaint: str) -> None:
    cli("generate", "--server", server, *options, *SHORT).failed(complaint, lines=1)


def test_where_there_is_no_server(cli: Cli, target: str) -> None:
    nobody = cli("generate", "--server", "127.0.0.1:1", *SHORT)
    nobody.failed("check that the service runs there", 1)
    assert "server at 127.0.0.1:1" in nobody.err
    complaint = f"what listens at {target} does not serve crossdraft.v1.Generation; check the address"
    cli("generate", "--server", target, *SHORT).failed(complaint, 1)
    assert cli("generate", "--server", "nowhere", *SHORT).code == 2
    assert cli("generate", "--model", "toy", *SHORT).code == 2


def test_keys_and_metrics_over_grpc(cli: Cli, ready: dict[str, Any]) -> None:
    def tokens() -> float:
        return metric(ready["metrics"], "generation_tokens_total", drafter="small", model_name="toy")

    ask, before = ("generate", "--server", ready["address"], "--json", *SHORT), tokens()
    cli(*ask).failed("an API key is needed", 1)
    assert cli(*ask, "--api-key", KEY).code == 0
    assert tokens() == before + 12


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    """Certificates of 127.0.0.1, and another CA."""
    for name in ("ours", "theirs"):
        assert cli("certs", tmp_path / name, "--host", "127.0.0.1").code == 0
    return tmp_path


def test_http_and_grpc_beside_it_with_keys_metrics_and_a_certificate(cli: Cli, pair: Pair, keys: Path, folder: Path):
    ours, other_ca = folder / "ours", folder / "theirs" / "ca.pem"
    shown = ("--ssl-certfile", ours / "127.0.0.1.pem", "--ssl-keyfile", ours / "127.0.0.1.key", "--api-keys", keys)
    with api("http", pair, "--grpc-port", 0, *shown) as ready:
        assert (ready["ready"], ready["role"], ready["model"]) == (True, "http", "toy")
        url = f"https://{ready['address']}"
        trusting = ssl.create_default_context(cafile=ours / "ca.pem")
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, verify=trusting, headers=headers, timeout=60) as client:
            assert client.get("/ready").json() == {"status": "ready", "models": ["toy"]}
            assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
            done = client.post("/v1/completions", json=BODY).json()
            assert done["usage"]["completion_tokens"] == 12
            tokens = 'crossdraft_generation_tokens_total{drafter="small",model_name="toy"} 12.0'
            assert tokens in client.get("/metrics").text
            assert "<html" in client.get("/").text
        for verify in (True, ssl.create_default_context(cafile=other_ca)):
            with (
                httpx.Client(base_url=url, verify=verify, timeout=60) as other,
                pytest.raises(httpx.ConnectError, match="verify"),
            ):
                other.get("/health")
        with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
            plain.get(f"http://{ready['address']}/health")
        ask = ("generate", "--server", ready["grpc"], "--api-key", KEY, "--json", *SHORT)
        assert cli(*ask, "--tls-ca", ours / "ca.pem").records[-1]["text"] == done["choices"][0]["text"]
        for options in ((), ("--tls-ca", other_ca)):
            cli(*ask, *options).failed(f"server at {ready['grpc']}", 1)


@pytest.fixture(scope="module")
def one(target_folder: Path, drafter_folder: Path) -> "Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]":
    """One command for a pair; others reach its services, too. The first of them that ends it ends it for all."""
    own = ("--target-model", target_folder, "--drafter-model", drafter_folder, "--cache-mib", 64, "--threads", 1)
    ports = ("--grpc-port", 0, "--target-port", 0, "--drafter-port", 0)
    with serving("http", "--port", 0, *own, *ports, "--grace-seconds", 300, "--log-level", "warning") as started:
        yield started


def client_of(ready: dict[str, Any], retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{ready['address']}/v1", api_key="none", timeout=300, max_retries=retries)


@pytest.fixture
def asked(one: "tuple[subprocess.Popen[str], dict[str, Any]]") -> Iterator[openai.OpenAI]:
    with client_of(one[1]) as client:
        yield client


def test_a_pair_by_one_command(cli, one, asked, target_folder):
    ready, name = one[1], str(target_folder)
    assert (ready["role"], ready["model"]) == ("http", name)
    assert httpx.get(f"http://{ready['address']}/ready").json() == {"status": "ready", "models": [name]}
    body = {"ignore_eos": True, "speculative": {"overlap": "off", "k": 3}}
    done = asked.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=body)
    model, tokenizer = load_model(LoadOptions(name)).model, AutoTokenizer.from_pretrained(name)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    ids = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert done.choices[0].text == tokenizer.decode(ids[0, -12:])
    assert metric(ready["address"], "service_passes_total", role="target") > 0
    assert metric(ready["address"], "service_draft_tokens_total", role="drafter") > 0
    assert metric(ready["address"], "service_bytes_total", role="target") == 0
    others = ("generate", "--target", ready["target"], "--drafter", ready["drafter"], "--json", *SHORT)
    assert cli(*others).records[-1]["text"] == done.choices[0].text
    assert cli("generate", "--server", ready["grpc"], "--json", *SHORT).records[-1]["text"] == done.choices[0].text
    assert metric(ready["address"], "service_bytes_total", role="target") > 0


@contextmanager
def own_models(target: Path, *options: object, workers: int = 1) -> Iterator[tuple["subprocess.Popen[str]", Any]]:
    """An API with its own models, which lets outputs go on for very long when it is told to end, and its ready line."""
    own = ("--target-model", target, "--cache-mib", 64, "--threads", 1, "--workers", workers, *options)
    with serving("http", "--port", 0, *own, "--grace-seconds", 3000, "--log-level", "error") as started:
        yield started


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose outputs may be longer than a test."""
    return save(tmp_path_factory.mktemp("long"), kind("gpt2"), 4096)


def ended_by_a_second_signal(server: "subprocess.Popen[str]", ready: dict[str, Any]) -> None:
    """Whatever the first one lets go on."""
    with client_of(ready) as client:
        settings: Any = {"model": ready["model"], "prompt": PROMPT, "max_tokens": 4000}
        stream = client.completions.create(**settings, extra_body={"ignore_eos": True}, stream=True)
        next(stream)
        for number in (signal.SIGINT, signal.SIGTERM):  # the second one comes where the test ends the server
            server.send_signal(number)
            with suppress(OSError):
                while number == signal.SIGINT:  # until nobody listens: the signal has been taken
                    socket.create_connection(ready["address"].split(":")).close()
        with pytest.raises(openai.APIError, match="the server ends"):
            list(stream)


def test_a_second_signal_ends_what_the_first_one_lets_go_on(long_target: Path) -> None:
    with own_models(long_target) as started:
        ended_by_a_second_signal(*started)


def test_the_models_are_beside_several_workers(one, asked, long_target, drafter_folder):
    """One that is killed takes no model with it, and a second signal ends all."""
    settings: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    body = {"ignore_eos": True, "speculative": {"overlap": "off", "k": 3}}
    expected = asked.completions.create(model=one[1]["model"], **settings, extra_body=body).choices[0].text
    own = ("--drafter-model", drafter_folder, "--grpc-port", 0)
    with own_models(long_target, *own, workers=2) as (server, ready):
        for pid in ready["workers"]:
            for _ in range(4):
                with client_of(ready, openai.DEFAULT_MAX_RETRIES) as client:
                    done = client.completions.create(model=ready["model"], **settings, extra_body=body)
                assert done.choices[0].text == expected
            if pid == ready["workers"][0]:
                os.kill(pid, signal.SIGKILL)
        assert "crossdraft_service_draft_tokens_total" in httpx.get(f"http://{ready['drafter_metrics']}/metrics").text
        ended_by_a_second_signal(server, ready)


def test_one_process_that_is_told_to_end_lets_its_outputs_end(one, asked):
    process, ready = one
    settings = {"model": ready["model"], "prompt": PROMPT, "max_tokens": 100, "seed": 3}
    whole = asked.completions.create(**settings, extra_body={"ignore_eos": True}).choices[0].text
    stream = asked.completions.create(**settings, stream=True, extra_body={"ignore_eos": True})
    pieces = [next(stream).choices[0].text]
    process.send_signal(signal.SIGTERM)
    assert "".join(pieces + [chunk.choices[0].text for chunk in stream]) == whole
    assert process.wait(300) == 0


def test_a_pair_that_cannot_be_served(cli: Cli, target_folder: Path, target: str) -> None:
    own = ("--target-model", target_folder)
    for options, complaint, code in (
        ((), "give --target-model, a model to run here, or --target, where one runs", 2),
        (("--target", target), "give --model, the name of the model in the API", 2),
        (("--target", target, "--model", "toy", "--dtype", "float32"), "--dtype is for --target-model and", 2),
        (("--target-model", "no-model", "--target-port", target.rpartition(":")[2]), f"cannot listen on {target}", 1),
        (("--target-model", "bundled:nothing"), "there is no bundled model 'bundled:nothing'", 1),
        ((*own, "--max-model-len", "100000"), "--max-model-len", 2),
    ):
        for front in ("http", "grpc"):
            cli("serve", front, "--port", "0", *options).failed(complaint, code)


def test_the_length_of_a_session_is_the_targets() -> None:
    """A drafter with a shorter context keeps the newest text."""
    engine = OwnModels(drafter_device="cuda:1", dtype="float32", max_model_len=1000).of_drafter
    assert (engine.device, engine.dtype, engine.max_model_len) == ("cuda:1", "float32", None)


def test_certificates_that_cannot_be_used(cli: Cli, folder: Path) -> None:
    serve = ("serve", "http", "--target", "127.0.0.1:1", "--model", "toy")
    ours = folder / "ours"
    certificate, key = ours / "127.0.0.1.pem", ours / "127.0.0.1.key"
    other = folder / "theirs" / "127.0.0.1.key"
    own = ("--target-model", "bundled:target", "--tls-ca", ours / "ca.pem", "--tls-cert", certificate, "--tls-key", key)
    for command, complaint in (
        ((*serve, "--ssl-certfile", certificate), "--ssl-certfile and --ssl-keyfile go together"),
        ((*serve, "--ssl-certfile", certificate, "--ssl-keyfile", other), "does not belong"),
        ((*serve, "--ssl-certfile", folder, "--ssl-keyfile", key), "cannot be read"),
        (("generate", "--server", "127.0.0.1:1", "--tls-ca", key, *SHORT), "is no certificate in PEM"),
        ((*serve[:2], "--workers", 2, *own), "--workers reach own models at 127.0.0.1"),
        (("generate", "--server", "127.0.0.1:1", "--tls-key", key, *SHORT), "a server takes no client certificates"),
    ):
        cli(*command).failed(complaint)


def test_none_is_no_drafter(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LocalModel] = []
    monkeypatch.setattr(serve, "_serve_api", lambda api, *_: found.append(serve._local_model(api, {})))
    none = ("serve", *API_HERE, "--drafter", "none")
    assert cli(*none).code == 0
    assert [model.drafters for model in found] == [()]
    assert "leave it out" in cli(*none, "--drafter-model", "bundled:drafter-b").err


def test_how_long_outputs_wait_for_a_target(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LocalOptions] = []
    monkeypatch.setattr(serve, "_serve_api", lambda _, local, *__: found.append(local))
    for front in ("http", "grpc"):
        cli("serve", front, *API_HERE[3:], "--target-wait-seconds", "0.5", "--reply-wait-seconds", "90").says()
    assert [(local.patience.target_seconds, local.patience.reply_seconds) for local in found] == [(0.5, 90)] * 2


def test_without_the_extra_only_http_cannot_be_served() -> None:
    missing = "sys.modules.update(fastapi=None, uvicorn=None, starlette=None)"
    done = lacking(missing, *(f"serve {front} --target nowhere --model tiny" for front in ("http", "grpc")))
    assert done.returncode == 2
    http, grpc = done.stderr.splitlines()
    assert "HTTP needs the extra `http`: in the checkout, run pip install -c constraints.txt -e '.[http]'" in http
    assert "--target must be HOST:PORT" in grpc
