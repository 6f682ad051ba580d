"""One Ray cluster for all tests of this folder; it starts with the first test that wants it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.running import RunningCluster


@pytest.fixture(scope="session")
def cluster() -> "Iterator[RunningCluster]":
    """Two nodes with loopback addresses, and the usual configuration on them."""
    from tests.cluster.running import running
    from tests.serving.ports import free_port

    # Not below pytest's folder: paths of sockets in it would be too long.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        running(Path(folder), [free_port(), free_port()]) as found,
    ):
        done = found.command("deploy", found.file(found.configuration()))
        assert done.returncode == 0, done.stderr
        yield found
