"""What is logged beside vLLM, which sets up its own loggers only: of others Python shows bare texts of warnings."""

import logging
import time
from collections.abc import Callable

FIRST_PAUSE = 60.0  # seconds between two lines of one kind; it doubles
LONGEST_PAUSE = 3600.0


def show(log: logging.Logger) -> None:
    """Let the lines of a logger, such as that of the whole package, say where they come from, unless handlers do."""
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s crossdraft: %(message)s", "%m-%d %H:%M:%S"))
    log.addHandler(handler)


class Seldom:
    """Warns of what comes again and again, at most once a minute and then less and less often."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._not_before = 0.0

    def warning(self, text: str, *values: object) -> None:
        now = self._clock()
        if now < self._not_before:
            return
        self._log.warning(text, *values)
        self._not_before, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
