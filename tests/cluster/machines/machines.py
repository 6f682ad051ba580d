"""Emulated machines to bring up clusters on: hosts of an emulated network with sshd.

A machine has a network, processes, mounts, a name, a home and a /tmp/ray of its own, and sshd as its first process.
Other files and the CPUs are shared with this machine. It can be switched off (its first process is killed, and all
others with it), and its link can be delayed or cut like that of any host. Its first process is

    python machines.py NAME FOLDER

in namespaces of its own, so that nothing that it mounts is seen from outside; it then becomes sshd.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from crossdraft.lab.emulation.network import EmulatedHost, NoEmulationError, hosts

NEEDED = ("sshd", "ssh", "ssh-keygen", "rsync", "nsenter", "setpriv", "unshare", "mount", "ip")  # commands
WHERE = (*os.get_exec_path(), "/usr/sbin", "/sbin")
TOGETHER = ("setpriv", "--pdeathsig", "KILL")  # a machine does not outlive this process
OWN = ("--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
BOOT_SECONDS = 30.0
OFF_SECONDS = 10.0
RUN_SECONDS = 120.0  # for a command
PORT = 22
COMMANDS = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}  # of an outfit, and the modules that they run
# Machines are made anew each time, so their keys cannot be known.
UNKNOWN = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
SSH_OPTIONS = UNKNOWN | {"IdentitiesOnly": "yes", "BatchMode": "yes"}
LOGIN = "\n".join(["IdentityFile ~/.ssh/id", *(f"{name} {value}" for name, value in UNKNOWN.items()), ""])

CONFIGURATION = """
ListenAddress 0.0.0.0
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxSessions 100
MaxStartups 100
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class MachineFiles:
    """Files of one machine."""

    name: str
    folder: Path  # of all machines

    @property
    def own(self) -> Path:
        """The folder of this machine."""
        return self.folder / self.name

    @property
    def home(self) -> Path:
        """Of root on this machine."""
        return self.own / "home"

    @property
    def log(self) -> Path:
        """Of its first process."""
        return self.own / "log"

    def furnish(self, key: Path) -> None:
        """Makes the files that the machine boots with; `key` is the one that lets root in to all machines."""
        login = self.home / ".ssh"
        login.mkdir(mode=0o700, parents=True)
        (self.own / "ray").mkdir()
        shutil.copyfile(key.with_suffix(".pub"), login / "authorized_keys")
        shutil.copyfile(key, login / "id")
        (login / "id").chmod(0o600)
        (login / "config").write_text(LOGIN, encoding="ascii")
        (self.home / ".bashrc").touch()


def _write_common_files(folder: Path, addresses: Mapping[str, str]) -> None:
    """The configuration of sshd, and the /etc/hosts of all machines, with their addresses by name."""
    (folder / "sshd_config").write_text(f"HostKey {folder / 'host_key'}\n{CONFIGURATION}", encoding="utf-8")
    lines = [f"{address} {name}\n" for name, address in addresses.items()]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]), encoding="ascii")


@dataclass(frozen=True)
class Machine:
    """A running machine."""

    name: str
    link: EmulatedHost
    home: Path  # of root
    key: Path  # lets root in
    first: int  # process id of its sshd, as seen from here
    outer: asyncio.subprocess.Process  # that waits for it

    @property
    def address(self) -> str:
        """IPv4, from here and from the other machines."""
        return self.link.place.listen

    def ssh(self, command: str) -> tuple[str, ...]:
        """The command line that has `command` run there by a shell."""
        options = (part for name, value in SSH_OPTIONS.items() for part in ("-o", f"{name}={value}"))
        return ("ssh", "-i", str(self.key), *options, f"root@{self.address}", command)

    async def run(self, command: str, seconds: float = RUN_SECONDS) -> str:
        """What a command writes there. Raises AssertionError: it fails; TimeoutError: it has not ended by then."""
        process = await asyncio.create_subprocess_exec(*self.ssh(command), stdout=subprocess.PIPE)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), seconds)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0
        return output.decode().strip()

    async def kill(self) -> None:
        """Kills all its processes at once; the network still tells their peers."""
        os.kill(self.first, signal.SIGKILL)
        await self.outer.wait()

    async def part(self, *others: "Machine") -> None:
        """Nothing passes between it and the others from now on, and nobody is told; all else passes as before."""
        await self._drop("add", others)

    async def join(self, *others: "Machine") -> None:
        """What they send each other from now on passes again."""
        await self._drop("del", others)

    async def _drop(self, change: str, others: Sequence["Machine"]) -> None:
        for one, other in chain.from_iterable(((self, far), (far, self)) for far in others):
            rule = ("ip", "rule", change, "pref", "1", "from", other.address, "blackhole")
            process = await asyncio.create_subprocess_exec(*one.link.place.prefix, *rule)
            assert await process.wait() == 0 or change == "del"  # there may be none

    async def switch_off(self) -> None:
        """As if its power were cut: its processes are gone, and their peers are not told."""
        await self.link.cut()
        await self.kill()


@asynccontextmanager
async def machines(names: Sequence[str], folder: Path) -> AsyncIterator[Mapping[str, Machine]]:
    """Machines of these names, for the time of the block; root on each can log in to all others.

    Args:
        names: as host names; other machines find them by these, too.
        folder: an empty one, for keys, homes, and what Ray leaves.

    Raises:
        NotAllowed: they need root, /dev/net/tun, sshd, ssh, rsync, and util-linux.
    """
    missing = [name for name in NEEDED if shutil.which(name, path=os.pathsep.join(WHERE)) is None]
    if missing:
        raise NoEmulationError(f"there is no {', no '.join(missing)}")
    async with AsyncExitStack() as stack:
        links = await stack.enter_async_context(hosts(names))
        key = await _key(folder / "key")
        await _key(folder / "host_key")
        _write_common_files(folder, {name: link.place.listen for name, link in links.items()})
        booted: dict[str, Machine] = {}
        for name, link in links.items():
            booted[name] = await _booted(MachineFiles(name, folder), link, key, stack)
        await asyncio.gather(*(_answers(machine) for machine in booted.values()))
        yield booted


async def _booted(files: MachineFiles, link: EmulatedHost, key: Path, stack: AsyncExitStack) -> Machine:
    files.furnish(key)
    module = (sys.executable, __file__, files.name, str(files.folder))
    line = (*TOGETHER, *link.place.prefix, "unshare", *OWN, *module)
    with files.log.open("wb") as log:
        outer = await asyncio.create_subprocess_exec(
            *line, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    stack.push_async_callback(_off, outer)
    return Machine(files.name, link, files.home, key, await _first(outer, files), outer)


async def _first(outer: asyncio.subprocess.Process, files: MachineFiles) -> int:
    """The process id of the machine's first process: the only child of `unshare`."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    until = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < until and outer.returncode is None:
        with suppress(OSError, IndexError):  # it has ended, or has no child yet
            return int(children.read_text(encoding="ascii").split()[0])  # noqa: ASYNC240 - of /proc
        await asyncio.sleep(0.01)
    raise NoEmulationError(f"machine {files.name} does not start: {_last_words(files.log)}")


async def _answers(machine: Machine) -> None:
    """Returns once a command can be run there. Raises NoEmulationError."""
    until, said = time.monotonic() + BOOT_SECONDS, b""
    while time.monotonic() < until and machine.outer.returncode is None:
        process = await asyncio.create_subprocess_exec(
            *machine.ssh("true"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode == 0:
            return
        await asyncio.sleep(0.1)
    log = _last_words(machine.home.parent / "log")
    raise NoEmulationError(f"machine {machine.name} does not let in: {said.decode(errors='replace').strip()} {log}")


async def _off(outer: asyncio.subprocess.Process) -> None:
    """`unshare` takes the machine with it."""
    if outer.returncode is None:
        outer.kill()
    await asyncio.wait_for(outer.wait(), OFF_SECONDS)


async def _key(path: Path) -> Path:
    process = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    if await process.wait():
        raise NoEmulationError(f"no key can be made at {path}")
    return path


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _passwd(files: MachineFiles) -> Path:
    """A copy of /etc/passwd with another home for root."""
    changed = files.own / "passwd"
    fields = [line.split(":") for line in Path("/etc/passwd").read_text(encoding="utf-8").splitlines()]
    homes = [[*one[:5], str(files.home), *one[6:]] if one[0] == "root" else one for one in fields]
    changed.write_text("".join(":".join(one) + "\n" for one in homes), encoding="utf-8")
    return changed


def main(name: str, folder: Path) -> None:
    """The first process of a machine: mounts what is its own, and becomes sshd."""
    files = MachineFiles(name, folder)
    ray = Path("/tmp/ray")
    ray.mkdir(exist_ok=True)
    for mounted in (
        ("--make-rprivate", "/"),
        ("-t", "tmpfs", "tmpfs", "/dev/shm"),
        ("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"),
        ("--bind", files.own / "ray", ray),
        ("--bind", _passwd(files), "/etc/passwd"),
        ("--bind", folder / "hosts", "/etc/hosts"),
    ):
        subprocess.run(["mount", *mounted], check=True)
    Path("/run/sshd").mkdir(mode=0o755)
    # So that `Machine.part` can have a rule before that of local addresses.
    for change in ("add pref 2 lookup local", "del pref 0"):
        subprocess.run(["ip", "rule", *change.split()], check=True)
    socket.sethostname(name)
    os.chdir(files.home)
    environment = {"HOME": str(files.home), "PATH": os.defpath + ":/usr/sbin:/usr/bin:/sbin:/bin"}
    sshd = shutil.which("sshd", path=environment["PATH"])
    if sshd is None:
        raise SystemExit("there is no sshd")
    os.execve(sshd, [sshd, "-D", "-e", "-f", str(folder / "sshd_config")], environment)


def outfit(folder: Path) -> Path:
    """Makes a Python environment for a machine, and returns its Python; nothing is downloaded.

    Packages installed in it are that machine's only; all others are found where the Python that runs this has them.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    packages = sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(packages) / "shared.pth").write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")
    for name, module in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    return python


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
