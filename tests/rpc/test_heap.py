"""What was loaded before is left alone by full collections, garbage before is not kept."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from crossdraft.rpc.server import freeze_heap


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_not_looked_at_again() -> None:
    kept = [Node() for _ in range(1000)]
    freeze_heap()
    assert gc.get_freeze_count() >= 1000
    left = {id(one) for one in gc.get_objects()}
    assert not left & {id(one) for one in kept}


def test_garbage_from_before_and_after_is_collected() -> None:
    before = weakref.ref(Node())
    freeze_heap()
    after = weakref.ref(Node())
    gc.collect()
    assert before() is None
    assert after() is None
