"""Somebody who brings up a cluster on three or more machines, with the commands of docs/cluster.md."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.machines.machines import Machine, machines, outfit

REPOSITORY = Path(__file__).parents[3]
FILE = "deploy/cluster.local.yaml"
CONFIGURATION = "~/crossdraft/serve.yaml"  # on the head
PORT = 8000
WORDS = 2000  # characters of what a command said that are shown when it fails
OFFERS = {  # of machines that are named after what they run
    "drafter": {"drafter": 1},
    "target": {"target": 1},
    "front": {"ingress": 8},
    "orchestrator": {"orchestrator": 8},
}
ALIVE = """
import ray, sys, time
ray.init("auto", log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.2)
"""


@dataclass
class Person:
    """Their computer: a checkout, a home, and ssh to all machines. The first machine becomes the head."""

    folder: Path
    machines: Mapping[str, Machine]
    seconds: dict[str, float] = field(default_factory=dict)  # that each step took, by its command

    @property
    def head(self) -> Machine:
        """The first one."""
        return next(iter(self.machines.values()))

    @property
    def url(self) -> str:
        """Of the HTTP API."""
        return f"http://{self.head.address}:{PORT}"

    @property
    def checkout(self) -> Path:
        """Where commands are run."""
        return self.folder / "checkout"

    def edit(self, file: str, **values: str) -> None:
        """Changes lines `name: value` of a file of the checkout, each in its first place."""
        path = self.checkout / file
        text = path.read_text(encoding="utf-8")
        for name, value in values.items():
            text, count = re.subn(rf"^(\s*(?:- )?{name}:) .*$", rf"\1 {value}", text, count=1, flags=re.MULTILINE)
            assert count == 1, f"{file} has no {name}"
        path.write_text(text, encoding="utf-8")

    def replace(self, file: str, old: str, new: str) -> None:
        """Changes a file of the checkout wherever it has `old`."""
        path = self.checkout / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def spare(self) -> None:
        """Settings for two cores: parts of one for each replica, no dashboard, no processes in stock."""
        self.replace("deploy/serve.yaml", "cpus: 0.5,", "cpus: 0.1,")
        self.replace("deploy/serve.yaml", "cpus: 1,", "cpus: 0.5,")
        self.replace(FILE, "--autoscaling-config=", "--include-dashboard=false --autoscaling-config=")
        for machine in self.machines.values():
            (machine.home / ".bashrc").write_text("export RAY_prestart_worker_first_driver=0\n", encoding="ascii")

    def clone(self) -> None:
        """What a checkout has that the commands use, with the machines' addresses written in."""
        for file in ("constraints.txt", FILE, "deploy/serve.yaml"):
            (self.checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / file, self.checkout / file)
        head, *workers = (machine.address for machine in self.machines.values())
        addresses = f"[{', '.join(workers)}]"
        self.edit(FILE, head_ip=head, worker_ips=addresses, ssh_user="root", ssh_private_key=str(self.head.key))

    async def make_wheel(self, sources: Path = REPOSITORY) -> None:
        """As `make wheel`, without asking a package index."""
        dist = self.checkout / "dist"
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(dist)]
        await self.run("make wheel", *build, cwd=sources)

    async def bring_up(self, sources: Path = REPOSITORY) -> None:
        """A cluster of all machines, from a checkout, with nothing deployed."""
        self.spare()
        for name in OFFERS.keys() & self.machines.keys():
            offers = self.machines[name].home / "crossdraft" / "offers.json"
            offers.write_text(json.dumps(OFFERS[name]), encoding="ascii")
        await self.make_wheel(sources)
        await self.ray("get-auth-token", "--generate")
        await self.ray("up", "--yes", FILE)
        await self.all_alive()

    async def ray(self, *words: str, seconds: float = 600.0, name: str | None = None) -> str:
        """A command of Ray's; what it said."""
        return await self.run(
            name or f"ray {words[0]}", sys.executable, "-m", "ray.scripts.scripts", *words, seconds=seconds
        )

    async def exec(self, command: str, seconds: float = 600.0) -> str:
        """A command on the head."""
        return await self.ray("exec", FILE, command, seconds=seconds, name=f"ray exec … '{command}'")

    async def on_head(self, script: str, *words: str, seconds: float = 60.0) -> None:
        """Python on the head, past Ray's launcher."""
        line = subprocess.list2cmdline(words)
        command = f"bash -ic {shlex.quote(f'python -c {shlex.quote(script)} {line}')}"
        await self.run(f"python on {self.head.name}", *self.head.ssh(command), seconds=seconds)

    async def all_alive(self, seconds: float = 300.0) -> None:
        """Returns once every machine is a node."""
        await self.on_head(ALIVE, str(len(self.machines)), seconds=seconds)

    async def run(self, name: str, *command: str, cwd: Path | None = None, seconds: float = 120.0) -> str:
        """Runs a command; AssertionError with what it said if it fails or takes too long."""
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd or self.checkout,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            raise AssertionError(f"{name} takes longer than {seconds:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said = output.decode(errors="replace")
        assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{said[-WORDS:]}"
        self.seconds[name] = time.monotonic() - began
        return said

    def _environment(self) -> dict[str, str]:
        """Another home, so that nothing of this computer's user is read or changed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "RAY_TMPDIR": str(self.folder / "ray")}
        return kept | own | {"RAY_USAGE_STATS_ENABLED": "0"}


@asynccontextmanager
async def person(names: Sequence[str], folder: Path) -> AsyncIterator[Person]:
    """With machines of these names, on which all that crossdraft needs is installed, but not crossdraft.

    Raises:
        NotAllowed: there can be no such machines here.
    """
    lab = folder / "machines"
    lab.mkdir()
    async with machines(names, lab) as found:
        for machine in found.values():
            outfit(machine.home / "crossdraft" / "venv")
        somebody = Person(folder / "person", found)
        somebody.clone()
        yield somebody


async def deploy(somebody: Person) -> None:
    """As docs/cluster.md says."""
    await somebody.exec(f"crossdraft deploy {CONFIGURATION}", seconds=1200.0)


async def processes(somebody: Person) -> list[dict[str, Any]]:
    """All that the directory names."""
    output = await somebody.exec("crossdraft status --json")
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return [*found["processes"]]
