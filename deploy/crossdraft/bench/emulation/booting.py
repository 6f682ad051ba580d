"""What the first process of a machine does: it makes the machine's own places, and becomes sshd.

    python -m crossdraft.bench.emulation.booting NAME FOLDER

It runs in namespaces of its own, so nothing that it mounts is seen from outside.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
LOGIN = """
Host *
  IdentityFile ~/.ssh/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@dataclass(frozen=True)
class Boot:
    """Where the things of one machine are."""

    name: str
    folder: Path  # of all machines

    @property
    def own(self) -> Path:
        """What is this machine's."""
        return self.folder / self.name

    @property
    def home(self) -> Path:
        """Of root."""
        return self.own / "home"

    @property
    def log(self) -> Path:
        """What sshd says."""
        return self.own / "log"

    def furnish(self, key: Path) -> None:
        """Makes what the machine finds when it boots, with `key` as the one that opens all machines."""
        login = self.home / ".ssh"
        login.mkdir(mode=0o700, parents=True)
        (self.own / "ray").mkdir()
        shutil.copyfile(key.with_suffix(".pub"), login / "authorized_keys")
        shutil.copyfile(key, login / "id")
        (login / "id").chmod(0o600)
        (login / "config").write_text(LOGIN, encoding="ascii")
        (self.home / ".bashrc").touch()


def write_boot(folder: Path, names: str) -> None:
    """What is the same on all machines: sshd's configuration, and their names."""
    (folder / "sshd_config").write_text(f"HostKey {folder / 'host_key'}\n{CONFIGURATION}", encoding="utf-8")
    (folder / "hosts").write_text(names, encoding="ascii")


def name_lines(addresses: Mapping[str, str]) -> str:
    """As in /etc/hosts."""
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _passwd(boot: Boot) -> Path:
    """This machine's, with another home for root."""
    changed = boot.own / "passwd"
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    fields = [line.split(":") for line in lines]
    homes = [[*one[:5], str(boot.home), *one[6:]] if one[0] == "root" else one for one in fields]
    changed.write_text("".join(":".join(one) + "\n" for one in homes), encoding="utf-8")
    return changed


def main(name: str, folder: Path) -> None:
    """Does not return."""
    boot = Boot(name, folder)
    ray = Path("/tmp/ray")
    ray.mkdir(exist_ok=True)
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    _mount("--bind", str(boot.own / "ray"), str(ray))
    _mount("--bind", str(_passwd(boot)), "/etc/passwd")
    _mount("--bind", str(folder / "hosts"), "/etc/hosts")
    Path("/run/sshd").mkdir(mode=0o755)
    socket.sethostname(name)
    os.chdir(boot.home)
    environment = {"HOME": str(boot.home), "PATH": os.defpath + ":/usr/sbin:/usr/bin:/sbin:/bin"}
    sshd = shutil.which("sshd", path=environment["PATH"])
    if sshd is None:
        raise SystemExit("there is no sshd")
    os.execve(sshd, [sshd, "-D", "-e", "-f", str(folder / "sshd_config")], environment)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
