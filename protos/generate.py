"""Generates the Python code of the protos beside them; `--check` says which committed files have drifted."""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "crossdraft" / "v1"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(into: Path) -> None:
    """Writes the generated code of all protos under `into`.

    Raises:
        SystemExit: protoc found a fault, which it has printed.
    """
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path.relative_to(ROOT)) for path in FOLDER.glob("*.proto"))
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")


def contents(root: Path) -> dict[Path, bytes]:
    """The generated files under a root, by their path below it."""
    return {path.relative_to(root): path.read_bytes() for pattern in GENERATED for path in root.rglob(pattern)}


def drifted() -> list[str]:
    """Paths of the committed files that differ from what the protos generate now, or that lack a counterpart."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = contents(Path(folder)), contents(ROOT)
    return sorted(str(path) for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a committed file has drifted")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    names = drifted()
    for name in names:
        print(f"{name} does not match its proto: run `python protos/generate.py`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
