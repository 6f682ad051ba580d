"""Which crossdraft a machine has. Runs on nodes with any version, so nothing else of crossdraft is imported here."""

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "crossdraft"
COMPILED = "__pycache__"
LABORATORY = "lab"
SHOWN = 12  # characters of the digest


@cache
def installed() -> str:
    """`on_disk` at the first call in this process: what it runs."""
    return on_disk()


def on_disk() -> str:
    """Version and digest of the package's files now; takes about 0.1 s."""
    digest = sha256()
    for name, path in sorted(_files()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return f"{_version()}+{digest.hexdigest()[:SHOWN]}"


def _files() -> Iterator[tuple[str, Path]]:
    """Relative paths and files of the packages inside the namespace package, but the laboratory, which no wheel has.

    Any folder named like it on Python's path belongs to it, also ~/crossdraft when a program runs in the home folder;
    so only folders with an `__init__.py` count.
    """
    for folder in map(Path, import_module(PACKAGE).__path__):
        for init in folder.glob("*/__init__.py"):
            for path in init.parent.rglob("*"):
                if COMPILED not in path.parts and path.is_file() and init.parent.name != LABORATORY:
                    yield path.relative_to(folder).as_posix(), path


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "0"
