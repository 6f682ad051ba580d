"""Makes the golden files again, from the code as it is: `python -m tests.golden.record [messages] [sessions]
[interface]`.

To be run only after a deliberate change of the wire, of what a session decides or of what users write; the diff is the
change.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from crossdraft.trace import recording
from crossdraft.trace.replay import replay
from tests.golden import interface, sessions
from tests.golden.messages import VALUES

MESSAGES = Path(__file__).parent / "messages.json"
VERDICTS = Path(__file__).parent / "verdicts.json"
COMMAND = [sys.executable, "-m", "crossdraft.cli"]
PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
METHODS = {
    "coupled": ("--method", "coupled", "--temperature", "0.9", "--top-k", "100"),
    "seeded": ("--method", "seeded", "--temperature", "0.8", "--seed", "7"),
    "slem": ("--method", "slem", "--temperature", "0.8", "--seed", "7"),
}
OVERLAPS = {
    "off": ("--overlap", "off"),
    "on": ("--overlap", "on", "--max-draft-tokens", "8", "--min-draft-tokens", "2", "--branches", "2"),
}
CASES = {
    f"{method}-{overlap}": (*options, *how) for method, options in METHODS.items() for overlap, how in OVERLAPS.items()
}


def write_json(value: object, path: Path) -> None:
    """As a file that people can read."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def record_messages() -> None:
    """The bytes of each value."""
    write_json({name: codec.to_bytes(value).hex() for name, (codec, value) in VALUES.items()}, MESSAGES)


@contextmanager
def serving(role: str, model: str) -> Iterator[str]:
    """The address of a service with a bundled model."""
    command = [*COMMAND, "serve", role, "--model", model, "--threads", "1", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def record_sessions() -> None:
    """A short generation of the bundled models for each case."""
    told = {}
    with (
        serving("target", "bundled:target") as target,
        serving("drafter", "bundled:drafter-a") as drafter,
        TemporaryDirectory() as folder,
    ):
        fixed = ("--target", target, "--drafter", drafter, "--max-tokens", "20", "--ignore-eos")
        for name, options in CASES.items():
            path = Path(folder) / name
            subprocess.run([*COMMAND, "generate", PROMPT, *fixed, *options, "--record", str(path)], check=True)
            made = recording.read(path)
            sessions.write(made, name)
            told[name] = {"rounds": replay(made).rounds, **sessions.verdicts(sessions.read(name))}
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
        record_sessions()
