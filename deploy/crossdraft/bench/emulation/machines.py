"""Machines on this one, to bring up clusters on: hosts of a network that one logs in to by ssh.

A machine has a network, processes, mounts, a name, a home and a /tmp/ray of its own, and sshd as its first process.
Files are otherwise shared with this machine, and so are its CPUs. It can be switched off (its first process is killed,
and all others with it), and its link can be delayed or cut like that of any host.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from crossdraft.bench.emulation.booting import Boot, name_lines, write_boot
from crossdraft.bench.emulation.network import Link, NotAllowed, hosts

NEEDED = ("sshd", "ssh", "ssh-keygen", "rsync", "nsenter", "setpriv", "unshare", "mount")  # commands
WHERE = (*os.get_exec_path(), "/usr/sbin", "/sbin")
TOGETHER = ("setpriv", "--pdeathsig", "KILL")  # a machine does not outlive this process
OWN = ("--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
BOOT_SECONDS = 30.0
OFF_SECONDS = 10.0
PORT = 22
# Machines are made anew each time, so their keys cannot be known.
SSH_OPTIONS = {
    "StrictHostKeyChecking": "no",
    "UserKnownHostsFile": "/dev/null",
    "IdentitiesOnly": "yes",
    "LogLevel": "ERROR",
    "BatchMode": "yes",
}


@dataclass(frozen=True)
class Machine:
    """One of them."""

    name: str
    link: Link
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

    async def kill(self) -> None:
        """All its processes at once; the network still tells their peers that they are gone."""
        os.kill(self.first, signal.SIGKILL)
        await self.outer.wait()

    async def switch_off(self) -> None:
        """As if its power were cut: whatever runs there is gone, and nothing more is heard of it."""
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
        raise NotAllowed(f"there is no {', no '.join(missing)}")
    async with AsyncExitStack() as stack:
        links = await stack.enter_async_context(hosts(names))
        key = await _key(folder / "key")
        await _key(folder / "host_key")
        write_boot(folder, name_lines({name: link.place.listen for name, link in links.items()}))
        booted: dict[str, Machine] = {}
        for name, link in links.items():
            booted[name] = await _booted(Boot(name, folder), link, key, stack)
        await asyncio.gather(*(_answers(machine) for machine in booted.values()))
        yield booted


async def _booted(boot: Boot, link: Link, key: Path, stack: AsyncExitStack) -> Machine:
    boot.furnish(key)
    command = (
        *TOGETHER,
        *link.place.prefix,
        "unshare",
        *OWN,
        sys.executable,
        "-m",
        "crossdraft.bench.emulation.booting",
    )
    with boot.log.open("wb") as log:
        outer = await asyncio.create_subprocess_exec(
            *(*command, boot.name, str(boot.folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    stack.push_async_callback(_off, outer)
    return Machine(boot.name, link, boot.home, key, await _first(outer, boot), outer)


async def _first(outer: asyncio.subprocess.Process, boot: Boot) -> int:
    """The process id of the machine's first process: the only child of `unshare`."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    loop = asyncio.get_running_loop()
    until = loop.time() + BOOT_SECONDS
    while loop.time() < until and outer.returncode is None:
        found = _text(children).split()
        if found:
            return int(found[0])
        await asyncio.sleep(0.01)
    raise NotAllowed(f"machine {boot.name} does not start: {_last_words(boot.log)}")


async def _answers(machine: Machine) -> None:
    """Returns once a command can be run there. Raises NotAllowed."""
    loop = asyncio.get_running_loop()
    until = loop.time() + BOOT_SECONDS
    said = b""
    while loop.time() < until and machine.outer.returncode is None:
        process = await asyncio.create_subprocess_exec(
            *machine.ssh("true"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        if process.returncode == 0:
            return
        await asyncio.sleep(0.1)
    log = _last_words(machine.home.parent / "log")
    raise NotAllowed(f"machine {machine.name} does not let in: {said.decode(errors='replace').strip()} {log}")


async def _off(outer: asyncio.subprocess.Process) -> None:
    """`unshare` takes the machine with it."""
    if outer.returncode is None:
        outer.kill()
    await asyncio.wait_for(outer.wait(), OFF_SECONDS)


async def _key(path: Path) -> Path:
    process = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    if await process.wait():
        raise NotAllowed(f"no key can be made at {path}")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # the process has ended
        return ""


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
