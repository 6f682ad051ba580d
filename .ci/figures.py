"""`figures.py`: how large the source is and how it hangs together, and what exceeds the limits. `--check`: then fail.

The product and the laboratory (benchmarks, emulations, training), which no wheel has, are counted apart.

A chain of imports is counted in modules, over imports at module level; modules that import each other count once.
Importers are counted over all imports, also those inside functions. Generated code is left out.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("services", "orchestrator", "deploy", "protos", "lab")
LABORATORY = "crossdraft.lab"
SMALL = 80  # lines of a module that may belong in its only importer
LIMITS = {  # a ratchet: what was reached, which no change may exceed; whoever brings a figure down lowers its limit
    "source modules": 161,
    "source lines": 37_980,
    "lines of the laboratory": 4_943,
    "modules in the largest folder": 18,
    "longest chain of imports": 17,
    "test lines": 38_193,
    "test lines of the laboratory": 1_987,
}
Imports = Mapping[str, set[str]]  # module -> modules that it imports


def source() -> dict[str, Path]:
    """The modules by name, without generated ones and empty `__init__.py` files."""
    found = {}
    for root in ROOTS:
        for path in sorted((REPOSITORY / root / "crossdraft").rglob("*.py")):
            if "_pb2" not in path.name and path.stat().st_size:
                parts = path.relative_to(REPOSITORY / root).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(nodes: Iterable[ast.AST], modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules of this project that import statements name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{one.name}" for one in node.names)
            found = {name if name in modules else node.module for name in names}
            yield from (name for name in found if name in modules)


def longest_chain(imports: Imports) -> list[str]:
    """The longest chain of imports, each module imported by the one before it."""
    reached = {name: reachable(name, imports) for name in imports}
    group = {name: min([name, *(one for one in ours if name in reached[one])]) for name, ours in reached.items()}

    @cache
    def below(name: str) -> tuple[str, ...]:
        members = [one for one in imports if group[one] == name]
        others = {group[one] for member in members for one in imports[member]} - {name}
        return (name, *max(map(below, others), key=len, default=()))

    return list(max(map(below, set(group.values())), key=len, default=()))


def reachable(name: str, imports: Imports) -> set[str]:
    """All that a module imports, at first or at second hand."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    modules = source()
    trees = {name: ast.parse(path.read_bytes()) for name, path in modules.items()}
    length = {name: lines(path) for name, path in modules.items()}
    package = {name: ".".join(name.split(".")[:2]) for name in modules}
    imports = {name: set(imported(tree.body, modules)) - {name} for name, tree in trees.items()}
    everywhere = {name: set(imported(ast.walk(tree), modules)) - {name} for name, tree in trees.items()}
    importers = Counter(one for names in everywhere.values() for one in names)
    folders = Counter(str(path.parent.relative_to(REPOSITORY)) for path in modules.values())
    (largest, count), chain = folders.most_common(1)[0], longest_chain(imports)
    lonely = [name for name in modules if importers[name] == 1 and length[name] < SMALL]
    tests = sum(map(lines, (REPOSITORY / "tests").rglob("*.py")))
    tests_of_laboratory = sum(map(lines, (REPOSITORY / "tests/lab").rglob("*.py")))
    product = [name for name, of in package.items() if of != LABORATORY]
    classes = sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree))

    members = defaultdict(list)
    for name, of in package.items():
        members[of].append(name)
    print(f"{'package':24}{'modules':>8}{'lines':>8}{'chain':>7}")
    for of, names in sorted(members.items()):
        inside = {name: imports[name] & set(names) for name in names}
        size = sum(length[name] for name in names)
        print(f"{of:24}{len(names):8}{size:8}{len(longest_chain(inside)):7}")
    figures = {
        "source modules": len(product),
        "source lines": sum(length[name] for name in product),
        "lines of the laboratory": sum(length.values()) - sum(length[name] for name in product),
        "modules in the largest folder": count,
        "longest chain of imports": len(chain),
        "test lines": tests - tests_of_laboratory,
        "test lines of the laboratory": tests_of_laboratory,
    }
    print(f"\n{classes} classes; the largest folder is {largest}; the longest chain of imports:\n {' → '.join(chain)}")
    print(f"{len(lonely)} modules under {SMALL} lines with one importer: {', '.join(lonely)}\n")
    for name, figure in figures.items():
        print(f"{name:32}{figure:7} of {LIMITS[name]:6}{'  EXCEEDED' * (figure > LIMITS[name])}")
    exceeded = any(figure > LIMITS[name] for name, figure in figures.items())
    return int(exceeded and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
