"""Files that a command is to write: checked before anything is done for them."""

import os
from errno import EACCES
from pathlib import Path

from crossdraft.cli.failures import Misused


def check_output(path: Path) -> None:
    """Raises Misused if a file cannot be written there."""
    fault = _fault_of(path)
    if fault:
        raise Misused(f"cannot write {path}: {fault}")


def _fault_of(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return "no such folder"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else os.strerror(EACCES)
    except OSError as error:  # a folder on the way may not be looked into
        return error.strerror or str(error)
