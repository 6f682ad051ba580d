"""Dockerfile and compose file: what can be known without a container engine."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from crossdraft.cli.app import app
from crossdraft.engine.names import bundled_names

REPOSITORY = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((REPOSITORY / "deploy/compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CUDA = yaml.safe_load((REPOSITORY / "deploy/compose.cuda.yaml").read_text(encoding="utf-8"))["services"]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: names and arguments, continued lines joined."""
    text = (REPOSITORY / "deploy/Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", "", lines).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined) if name]


def of(name: str) -> list[str]:
    return [rest for kind, rest in instructions() if kind == name]


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of a command line of ours, with each variable's default; typer's error if it is none."""
    name, *words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command]
    assert name == "crossdraft"
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    options: dict[str, Any] = found.make_context("", words).params
    return options


def test_what_is_copied_into_the_image_is_in_the_repository() -> None:
    copied = [path for rest in of("COPY") for path in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "services", "orchestrator", "deploy", "protos"} <= set(copied)
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []
    ignored = (REPOSITORY / "deploy/Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert [path for path in copied if f"!{path}" not in ignored] == []


def test_the_image_runs_as_somebody_without_rights_and_all_packages_are_pinned() -> None:
    last = [rest for kind, rest in instructions() if kind in ("FROM", "USER")][-1]
    assert int(last) > 0
    installing = [run for run in of("RUN") if "pip install" in run]
    assert len(installing) == 2
    assert all("--constraint /build/constraints.txt" in run or "--no-deps" in run for run in installing)
    assert not any(":latest" in rest or ":" not in rest for rest in of("FROM"))


def test_python_is_one_that_the_package_takes() -> None:
    (python,) = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("PYTHON=")]
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert tuple(map(int, python.split("."))) >= tuple(map(int, needed.removeprefix(">=").split(".")))


def test_every_run_is_one_for_a_shell() -> None:
    for run in of("RUN"):
        script = re.sub(r"^(--\S+\s+)+", "", run)
        checked = subprocess.run(["sh", "-nc", script], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, ""), script


def test_the_requirements_of_the_image_are_the_projects() -> None:
    (run,) = [run for run in of("RUN") if "tomllib" in run]
    script = re.search(r'python -c "(.*?)" >', run)
    source = script[1].replace("\\n", "\n").replace("/build/", f"{REPOSITORY}/").replace("sep='\n'", "sep=chr(10)")
    found = subprocess.run(["python3", "-c", source], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"grpcio>=1.85", "fastapi>=0.165", "ray[serve]>=2.60"} <= set(found)
    assert not [one for one in found if one.startswith("crossdraft")]  # it comes as the wheel


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_started_by_a_command_that_exists(name: str) -> None:
    options = parsed(SERVICES[name]["command"])
    assert options["host"] == "0.0.0.0"
    assert float(options["grace_seconds"]) < float(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))


def test_both_models_are_there_and_fit_one_gpu() -> None:
    options = parsed(SERVICES["http"]["command"])
    assert {options["target_model"], options["drafter_model"]} <= set(bundled_names())
    assert (options["device"], options["drafter_device"], options["gpu_memory_utilization"]) == ("cpu", "cpu", 0.9)
    (reserved,) = CUDA["http"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["capabilities"] == ["gpu"]
    home, folders = SERVICES["http"]["volumes"]
    assert f"HF_HOME={home.partition(':')[2]}" in of("ENV")[0].split()
    assert folders.endswith(":/models:ro")


def test_what_the_documents_set_is_read_by_the_compose_files() -> None:
    files = [(REPOSITORY / "deploy" / f"compose{one}.yaml").read_text(encoding="utf-8") for one in ("", ".cuda")]
    read = {*re.findall(r"\$\{(\w+):-", "".join(files)), *SERVICES["http"]["environment"]}
    said = (REPOSITORY / "docs" / "quick-start.md").read_text(encoding="utf-8").partition("## In containers")[2]
    named = set(re.findall(r"\b([A-Z_]{4,})=", "".join(files) + said.partition("\n## ")[0]))
    assert named <= read
    assert {"TARGET_DEVICE", "DRAFTER_DEVICE", "TARGET", "DRAFTER", "HF_TOKEN", "MODELS"} <= read


def test_the_front_is_published_on_this_machine_only() -> None:
    options = parsed(SERVICES["http"]["command"])
    published = [one.rsplit(":", 2) for one in SERVICES["http"]["ports"]]
    assert {host for host, _, _ in published} == {"127.0.0.1"}
    assert {int(inside) for _, _, inside in published} == {options["port"], options["grpc_port"]}
    assert f":{options['port']}/ready" in SERVICES["http"]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert re.fullmatch(r"\d+g|\$\{(?:[A-Z]+_)?MEMORY:-\d+g\}", service["mem_limit"])
    assert "privileged" not in service
