"""Reads what `/metrics` answers."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from crossdraft.rpc.metrics import PREFIX


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of all samples of a name, which is given without its prefix."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name
    ]


def value(text: str, name: str, labels: Mapping[str, str]) -> float:
    """The value of the one sample with exactly these labels."""
    (found,) = [found for others, found in samples(text, name) if others == labels]
    return found


def names(text: str) -> set[str]:
    """Of all samples that there are or could be."""
    found = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + suffix for suffix in suffixes}
    return found


SHORT = {"ms", "us", "ns", "s", "sec", "kb", "mb", "kib", "mib", "b"}
UNITS = SHORT | {"milliseconds", "microseconds", "minutes", "hours"}  # not Prometheus' base units
KINDS = {"counter", "gauge", "histogram"}


def faults(text: str) -> list[str]:
    """What Prometheus' own linter would say of names and values; empty if all is well."""
    found = []
    for family in text_string_to_metric_families(text):
        name, parts = family.name, set(family.name.split("_"))
        told = (
            (not family.documentation, "no help"),
            (not name.startswith(PREFIX), "no prefix"),
            (":" in name or name != name.lower(), "colons are for recording rules, capitals for nobody"),
            (family.type not in KINDS, "no type"),
            (family.type != "counter" and name.endswith("_total"), "only counters end in _total"),
            (family.type in ("gauge", "counter") and name.endswith(("_count", "_sum", "_bucket")), "a reserved end"),
            (bool(parts & UNITS), "a unit that is no base unit, or short"),
            (bool(parts & KINDS), "its type in its name"),
            (any(sample.value < 0 for sample in family.samples), "a value below 0"),
        )
        found += [f"{name}: {fault}" for wrong, fault in told if wrong]
    return found
