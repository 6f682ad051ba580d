"""Gives a machine an environment for Python in which nothing need be downloaded.

It has packages of its own, so that what is installed there is installed on that machine only, and finds all others
where the Python that runs this has them.
"""

import sys
import sysconfig
import venv
from pathlib import Path

COMMANDS = {"ray": "ray.scripts.scripts"}  # that a shell finds in it, and the modules that they run


def outfit(folder: Path) -> Path:
    """Makes the environment in `folder`, and returns its Python."""
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
