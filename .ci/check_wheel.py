"""`check_wheel.py WHEEL`: the wheel has every file of its four source roots, none of the laboratory, and metadata."""

import sys
import zipfile
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("services", "orchestrator", "deploy", "protos")


def expected() -> Counter[str]:
    """Paths below the source roots, with how many roots have each."""
    found: Counter[str] = Counter()
    for root in ROOTS:
        for path in (REPOSITORY / root / "crossdraft").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found[path.relative_to(REPOSITORY / root).as_posix()] += 1
    return found


def complaints(wheel: Path) -> list[str]:
    """What is wrong with the wheel, a line each."""
    wanted = expected()
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    return [
        *(f"{name} is in {count} source roots" for name, count in wanted.items() if count > 1),
        *(f"{name} is a namespace package's __init__.py" for name in packed if name == "crossdraft/__init__.py"),
        *(f"{name} is missing from the wheel" for name in sorted(wanted.keys() - packed)),
        *(f"{name} should not be in the wheel" for name in sorted(packed - wanted.keys())),
        *([] if any(name.endswith("/licenses/LICENSE") for name in names) else ["the licence is missing"]),
    ]


def main() -> int:
    wheel = Path(sys.argv[1])
    found = complaints(wheel)
    print("\n".join(found) or f"{wheel.name}: {sum(expected().values())} files, all there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
