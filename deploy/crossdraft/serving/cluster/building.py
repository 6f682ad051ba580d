"""The application where Serve builds it by itself from `import_path` and `args`, as KubeRay has it do.

Services are begun while it is built. What they replace ends once Serve runs the application, which an actor waits for.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve import Application
from ray.serve.schema import ApplicationStatus

from crossdraft.serving.cluster.application import application
from crossdraft.serving.cluster.deploying import begin_directory, rollouts, room_now
from crossdraft.serving.cluster.naming import APPLICATION, NAMESPACE
from crossdraft.serving.configuration import Configuration, parse
from crossdraft.serving.logs import logged

log = logging.getLogger(__name__)

FINISHER = "finisher"
ASKED_EVERY = 1.0  # seconds


def build(args: Mapping[str, object]) -> Application:
    """The application of a configuration, whose services serve already.

    Raises:
        ConfigurationError: the configuration cannot be used.
        NotServedError: a service cannot be run with its options; what ran before goes on.
    """
    configuration = parse(yaml.safe_dump(dict(args)), "args")
    with logged(configuration.log_format):
        begin_directory()
        below, _ = rollouts(configuration, log.info)
        try:
            below.begin()
        except ValueError:
            below.undo()
            raise
    actor: Any = ray.remote(Finisher)
    finisher = actor.options(name=FINISHER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0)
    finisher.remote().finish.remote(configuration)
    return application(configuration, room_now())


class Finisher:
    """One at a time: it ends what an application does not need any more."""

    def finish(self, configuration: Configuration) -> None:
        """Waits for Serve; if that fails, everything stays as it is."""
        with logged(configuration.log_format):
            while (state := _state()) not in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED):
                time.sleep(ASKED_EVERY)
            if state is ApplicationStatus.DEPLOY_FAILED:
                log.error("Serve cannot run the application; what it does not need goes on")
                return
            below, above = rollouts(configuration, log.info)
            for one in (above, below):
                one.begin()
                one.finish()


def _state() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status
