"""Where in a YAML file something is wrong."""

from yaml.nodes import MappingNode, Node, SequenceNode


def fault_of(name: str, root: Node, place: tuple[int | str, ...], complaint: str) -> str:
    """One fault with its line: of the value itself, or of what it is missing from."""
    path = ".".join(str(step) for step in place)
    said = complaint.removeprefix("Value error, ")
    return f"{name}, line {_line(root, place)}: {path + ': ' if path else ''}{said}"


def _line(node: Node, place: tuple[int | str, ...]) -> int:
    """Where a value is, or, if it is not there, where the part begins that lacks it; counts from 1."""
    line = node.start_mark.line + 1
    for step in place:
        found = _step(node, step)
        if found is None:
            break
        node, line = found
    return line


def _step(node: Node, step: int | str) -> tuple[Node, int] | None:
    """The value that one step leads to, and the line where it is named."""
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step].start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return value, key.start_mark.line + 1
    return None
