"""Outputs whose figures can be worked out by hand. Times are seconds."""

from dataclasses import replace

from crossdraft.lab.outputs import Output, OutputFigures
from crossdraft.types.statistics import BOUNDS, LaneFigures, Trips

TRIPS = (*(4 if bound == 0.005 else 0 for bound in BOUNDS), 0)  # four of 2.5 to 5 ms
TARGET = LaneFigures("target", "", 100, 300, Trips(TRIPS, 0.016, 0.004), "", 0.4, 0.002, 1.0, 0.5)
DRAFTER = LaneFigures("drafter", "", 50, 150, Trips(TRIPS, 0.014), "unreachable", 0.1, 0.001, 0.8, 0.2)
FIGURES = OutputFigures(
    4, passes=2, accepted=2, corrected=1, judged_at=(2, 1), accepted_at=(2, 0), lanes=(TARGET, DRAFTER)
)
# Asked at 10; tokens after 0.1, 0.2, 0.2 and 0.4 s; its end 0.1 s after the last.
WHOLE = Output(asked=10.0, moments=(10.1, 10.2, 10.2, 10.4), ended=10.5, made=(0.09, 0.18, 0.18, 0.37), figures=FIGURES)
FAILED = replace(WHOLE, asked=11.0, moments=(), ended=12.5, made=(), error="HTTP 429", fault="no room", figures=None)
