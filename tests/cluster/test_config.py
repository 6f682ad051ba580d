"""The configuration of a cluster: what is taken, and what is said of faults."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from crossdraft.cluster.config import ConfigurationError, Role, load, parse, processes_of
from crossdraft.config.cluster import Scale

SMALLEST = """\
models:
  - name: small
    target:
      model: bundled:target
"""
SHIPPED = Path(__file__).parents[2] / "deploy" / "serve.yaml"


def test_the_smallest_one_has_a_default_for_the_rest() -> None:
    (model,) = parse(SMALLEST).models
    assert (model.target.replicas, model.drafters, model.orchestrators) == (Scale(max=1), (), Scale(max=1))


def test_what_is_wrong_in_a_file_of_serves_is_said_with_its_line() -> None:
    text = SHIPPED.read_text("utf-8")
    line = 1 + text.splitlines().index("        replicas: 2")
    with pytest.raises(ConfigurationError, match=rf"line {line}: models\.0\.target\.replicas: "):
        parse(text.replace("replicas: 2", "replicas: 0", 1))
    with pytest.raises(ConfigurationError, match=r"line 1: there is no `args`"):
        parse("applications: [{name: crossdraft}]\n")


def test_values_keep_their_types() -> None:
    text = SMALLEST + "http: {port: 0}\nlog_format: plain\nsecurity: {api_keys: keys.txt}\n"
    made = parse(text)
    assert (made.http.port, made.log_format, made.security.api_keys) == (0, "plain", Path("keys.txt"))


def test_how_long_services_are_waited_for_is_a_setting() -> None:
    made = parse(SMALLEST + "target_wait_seconds: 50\nreply_wait_seconds: 90\n")
    (found,) = (one for one in processes_of(made) if one.role is Role.ORCHESTRATOR)
    assert (found.target_wait_seconds, found.reply_wait_seconds) == (50, 90)


def test_sampling_settings_are_configured_as_on_the_command_line() -> None:
    text = SMALLEST + "      generation_config: vllm\n      override_generation_config: {top_k: 20, temperature: 0.5}\n"
    assert parse(SMALLEST).models[0].target.generation_config == "auto"
    target = parse(text).models[0].target
    settings = json.loads(target.override_generation_config)
    assert (target.generation_config, settings) == ("vllm", {"top_k": 20, "temperature": 0.5})


@pytest.mark.parametrize("merged", ["{replicas: 2}", "[{replicas: 2}, {replicas: 3}]"])
def test_parts_may_be_merged_as_yaml_has_it(merged: str) -> None:
    (first, second) = parse(
        f"models:\n- name: a\n  target: &a\n    <<: {merged}\n    model: m\n- {{name: b, target: {{<<: *a, model: n}}}}"
    ).models
    assert first.target.replicas == second.target.replicas == Scale(min=2, max=2)
    assert second.target.model == "n"


FAULTS = (  # after the smallest configuration, and what is said
    ("      override_generation_config: {top_q: 1}\n", "it must be an object with some of temperature"),
    ("      override_generation_config: {top_p: 2.0}\n", "top_p must be above 0"),
    ("http: {rate: 5, requests_per_minute: 6}\n", "line 5: http.rate is in line 5 already: leave out"),
    ("      sessions: {most: 2}\n      max_sessions: 3\n", "max_sessions is in line 5 already"),
    ("metrics: true\nmetrics: false\n", "line 6: metrics is in line 5 already: leave out one"),
    ("      replicas: 0\n", r"line 5: models\.0\.target\.replicas: write a number of replicas above 0"),
    ("      replicas: two\n", r"line 5: models\.0\.target\.replicas: write a number of replicas above 0"),
    ("      replica: 2\n", r"line 5: .*\.replica: there is no such field; did you mean 'replicas'\?"),
    ("    orchestrators: {max: 2, xyz: 1}\n", r"\.xyz: there is no such field; there are min, max"),
    ("http: {port: 9000}\ngrpc: {}\n", "line 5: http.port: http and grpc have the same port, 9000"),
    ("http:\n  port: 7\ngrpc:\n  burst: 2\n  port: 7\n", "line 6: http.port: http and grpc have the sam"),
    ("grpc:\n  burst: 2\n  port: 8000\n", "line 7: grpc.port: http and grpc have the same port"),
    ("metrics_port: 8000\n", "line 5: metrics_port: a front has the same port, 8000"),
    ("http:\n  port: 70000\n", r"line 6: http\.port: .*less than or equal to 65535"),
    ("  - name: small\n    target: {model: m}\n", "two models have the name 'small'"),
    ("    orchestrators: many\n", r"line 5: models\.0\.orchestrators: write a number of replicas above 0, or \{min"),
    ("    orchestrators: 0\n", r"line 5: models\.0\.orchestrators: write a number of replicas above 0"),
    ("    orchestrators: {min: 3, max: 2}\n", "min, 3, must not be above max, 2"),
    (
        "    drafters: [{name: d, model: m}, {name: d, model: n}]\n",
        "line 2: models.0: two drafters of model 'small' have the name 'd'",
    ),
    ("    drafters: [{name: none, model: m}]\n", r"no drafter of model 'small' may be called 'auto' .* or 'none'"),
    (
        "    drafters:\n      - {name: d, model: m, frequencies: f.npz}\n",
        r"line 6: models\.0\.drafters\.0: --vocab-keep N \(vocab_keep\) and the --frequencies",
    ),
    (
        "      tensor_parallel_size: 2\n      port: 7001\n",
        "with tensor_parallel_size port and quantization are left out",
    ),
    ("      tensor_parallel_size: 2\n      resources: {gpus: 3}\n", "tensor_parallel_size must divide gpus"),
    (
        "    drafters:\n      - {name: d, model: m, tensor_parallel_size: 2}\n",
        r"line 6: models\.0\.drafters\.0\.tensor_parallel_size: Input should be 1",
    ),
    ("    drafters:\n      - {name: a b, model: m}\n", r"line 6: models\.0\.drafters\.0\.name: "),
    ("grace_seconds: -1\n", r"line 5: grace_seconds: "),
    *((f"{key}: x\n", rf"line 5: {key}: there is no such field") for key in ("5", "~", "on", "2024-01-01")),
    ("? [a, b]\n: c\n", "line 5: a key must be text"),
    ("? [a, b]\n: {c: 1, c: 2}\n", "line 5: a key must be text"),
    ("http:\n  ? {a: b}\n  : c\n", "line 6: a key must be text"),
    ("      override_generation_config: {2024-01-01: 1}\n", "line 5: .*: it must be an object with some of"),
    ("      override_generation_config: {top_k: 2024-01-01}\n", "line 5: .*: top_k must be a whole number"),
    ("      override_generation_config: {top_k: !!binary YQ==}\n", "line 5: .*: top_k must be a whole number"),
    ("      override_generation_config: &a {top_k: *a}\n", "it is nested too deeply, or contains itself"),
    (f"      override_generation_config: '{'[' * 50_000}'\n", "line 5: .*_config: maximum recursion depth exceeded"),
    ("http: {port: !!int x}\n", "line 5: 'x' is no int"),
    ("http: {port: !!int ''}\n", "line 5: '' is no int"),
    (f"http: {{port: {'9' * 5000}}}\n", "line 5: '9{50}' is no int"),
    (f"grace_seconds: !!float {':'.join(['59'] * 400)}\n", "line 5: '59:.*' is no float"),
    ("metrics: !!bool x\n", "line 5: 'x' is no bool"),
    ("log_format: 2024-13-45\n", "line 5: log_format: Input should be 'plain' or 'json'"),
    (
        "  - name: b\n    target: &t {model: m}\n  - target:\n      <<: *t\n      model: 5\n",
        "line 9: models.2.target.model",
    ),
)
# Nine levels of nine aliases: what is in them counts each time again.
NESTED = f"a: &a [{'x, ' * 9}]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in pairwise("abcdefghi"))
NONE_AT_ALL = (
    ("", "line 1: a configuration begins with `models:`"),
    ("- a\n", "line 1: a configuration begins with `models:`"),
    ("models: []\n", "line 1: models is empty"),
    ("models:\n  - name: x\n", r"line 2: models\.0\.target: Field required"),
    ("models: [\n", "line 2: "),
    ("models:\n\t- name: x\n", "line 2: "),
    ("applications: [{args: }]\n", "line 1: a configuration begins with `models:`"),
    (NESTED, "configuration: it has over 100000 values: leave out aliases"),
    ("models: &all [*all]\n", "configuration: it is nested too deeply, or contains itself"),
    ('models: "\x01"\n', "configuration: unacceptable character"),
    ("models: !!python/object:os.system {}\n", "line 1: could not determine a constructor"),
)


@pytest.mark.parametrize(("text", "complaint"), [*((SMALLEST + text, why) for text, why in FAULTS), *NONE_AT_ALL])
def test_a_fault_is_said_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse(text)


def test_paths_begin_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "served.yaml").write_text(SMALLEST + "security: {api_keys: keys.txt}\n")
    (tmp_path / "keys.txt").write_text("somebody 0123456789abcdef\n")
    assert load(tmp_path / "served.yaml").security.api_keys == tmp_path / "keys.txt"
    absolute = parse(SMALLEST + "security: {api_keys: /etc/keys.txt}\n", folder=tmp_path)
    assert absolute.security.api_keys == Path("/etc/keys.txt")


def test_all_faults_are_said_together() -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse(SMALLEST + "      replicas: 0\n      threads: 0\n")
    where = [line.split(":")[0] for line in str(raised.value).splitlines()]
    assert where == ["configuration, line 5", "configuration, line 6"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the configuration .*none\.yaml"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"models: \xff")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load(tmp_path / "latin.yaml")
