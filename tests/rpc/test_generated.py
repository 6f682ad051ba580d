"""The committed generated code is what the protos generate."""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[2] / "protos"


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=600, check=False)


def test_generated_code_has_not_drifted():
    done = check(PROTOS / "generate.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_drift_is_noticed_and_named(tmp_path):
    for path in [PROTOS / "generate.py", *(PROTOS / "crossdraft" / "v1").glob("*_pb2*"), *PROTOS.rglob("*.proto")]:
        copy = tmp_path / path.relative_to(PROTOS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    proto = tmp_path / "crossdraft" / "v1" / "drafter.proto"
    proto.write_text(proto.read_text().replace("uint32 count = 4", "uint64 count = 4"))
    done = check(tmp_path / "generate.py")
    assert done.returncode == 1
    assert "drafter_pb2.py does not match" in done.stderr
    assert "target" not in done.stderr
