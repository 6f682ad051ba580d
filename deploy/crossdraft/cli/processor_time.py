"""Processor time of other processes, as Linux counts it."""

import os
from pathlib import Path

PLACES = (13, 14)  # of user and system time among the fields of /proc/PID/stat, from 0


def processor_seconds(process: int) -> float:
    """Of all threads of a process since it began; 0.0 where there is no /proc or no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # The second field is the command's name in brackets, which may itself hold spaces and brackets.
    fields = ["", "", *text.rpartition(")")[2].split()]
    return sum(int(fields[place]) for place in PLACES) / os.sysconf("SC_CLK_TCK")
