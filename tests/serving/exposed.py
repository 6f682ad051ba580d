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


def faults(text: str) -> list[str]:
    """What Prometheus' own linter would say, and a little more; empty if all is well."""
    found = []
    for family in text_string_to_metric_families(text):
        name = family.name
        told = (
            (not family.documentation, "no help"),
            (not name.startswith(PREFIX), "no prefix"),
            (":" in name, "colons are for recording rules"),
            (name != name.lower(), "capitals"),
            (family.type in ("unknown", "untyped"), "no type"),
            (family.type != "counter" and name.endswith("_total"), "only counters end in _total"),
            (family.type in ("gauge", "counter") and name.endswith(("_count", "_sum", "_bucket")), "a reserved end"),
            (any(part in UNITS for part in name.split("_")), "a unit that is no base unit, or short"),
            (any(part in ("counter", "gauge", "histogram") for part in name.split("_")), "its type in its name"),
        )
        found += [f"{name}: {fault}" for wrong, fault in told if wrong]
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_total"):
                found.append(f"{sample.name}: a counter without _total")
            if "le" in sample.labels and family.type != "histogram":
                found.append(f"{sample.name}: le is for histograms")
            if sample.value < 0:
                found.append(f"{sample.name}: {sample.value}")
    return found


UNITS = {
    "ms",
    "us",
    "ns",
    "s",
    "sec",
    "milliseconds",
    "microseconds",
    "minutes",
    "hours",
    "kb",
    "mb",
    "kib",
    "mib",
    "b",
}
