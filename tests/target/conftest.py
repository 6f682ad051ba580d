"""The tiny models and services of `tests.services`, here too."""

from crossdraft.engine.served_model import RunningModel
from crossdraft.target.service import TargetSession
from crossdraft.types.messages import OpenTarget
from tests.rpc.linked import Direct
from tests.services.conftest import (  # noqa: F401 - fixtures
    drafter,
    drafter_folder,
    drafter_model,
    one_thread,
    seeded,
    target,
    target_folder,
    target_model,
    unhurried,
)


def opened(model: RunningModel, opening: OpenTarget) -> Direct:
    """A session on a model, without a service."""
    return Direct(lambda replies: TargetSession(model, opening, replies))
