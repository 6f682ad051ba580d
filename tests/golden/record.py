"""Makes the golden files again, from the code as it is: `python -m tests.golden.record [messages] [sessions]
[interface]`.

To be run only after a deliberate change of the wire, of what a session decides or of what users write; the diff is the
change.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from crossdraft.client import GenerationRequest, SamplingOptions
from crossdraft.session.assignment import Secrets
from crossdraft.session.models import with_defaults
from tests.client.together import ended
from tests.endtoend.stack import serving
from tests.golden import interface, sessions
from tests.golden.messages import VALUES
from tests.trace.recordings import Keeper

MESSAGES = Path(__file__).parent / "messages.json"
VERDICTS = Path(__file__).parent / "verdicts.json"
PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
METHODS: dict[str, dict[str, Any]] = {
    "coupled": {"method": "coupled", "options": SamplingOptions(0.9, 100)},
    "seeded": {"method": "seeded", "options": SamplingOptions(0.8), "seed": 7},
    "slem": {"method": "slem", "options": SamplingOptions(0.8), "seed": 7},
}
OVERLAPS: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "on": {"overlap": "on", "max_draft_tokens": 8, "min_draft_tokens": 2, "branches": 2},
}
CASES = {
    f"{method}-{overlap}": options | how for method, options in METHODS.items() for overlap, how in OVERLAPS.items()
}


def write_json(value: object, path: Path) -> None:
    """As a file that people can read."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def record_messages() -> None:
    """The bytes of each value."""
    write_json({name: codec.to_bytes(value).hex() for name, (codec, value) in VALUES.items()}, MESSAGES)


async def record_sessions() -> None:
    """A short generation of the bundled models for each case."""
    secrets, told = Secrets.drawn(), {}
    async with serving(["drafter-a"], ()) as stack:
        pipeline = await stack.pipeline("drafter-a")
        models = pipeline.models
        for name, settings in CASES.items():
            request = GenerationRequest.of(PROMPT, max_tokens=20, ignore_eos=True, **settings)
            request, keeper = with_defaults(request, models.target.defaults), Keeper()
            with patch.object(Secrets, "drawn", lambda: secrets):
                await ended(pipeline.run(request, keeper))
            sessions.write(sessions.Header(request, models.target, models.drafter, secrets), keeper.steps, name)
            told[name] = sessions.verdicts(sessions.read(name))
    write_json(told, VERDICTS)


def record_interface() -> None:
    """The help, and the schemas."""
    for name, text in interface.written().items():
        (interface.FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "interface" in sys.argv[1:] or not sys.argv[1:]:
        record_interface()
    if "messages" in sys.argv[1:] or not sys.argv[1:]:
        record_messages()
    if "sessions" in sys.argv[1:] or not sys.argv[1:]:
        asyncio.run(record_sessions())
