"""A recording as spans of time: who worked when, what was on its way, what the session did with it."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from crossdraft.pipeline.recording import Recording
from crossdraft.pipeline.spans import Figures, Happening, Message, Role, Row, Task, Timeline, Work
from crossdraft.pipeline.tracing import Answer, Asked, Flight, Tracer, name_of
from crossdraft.verification.exchange import Drafted, Pass


def spans_of(recording: Recording) -> Timeline:
    """The timeline of a recording, which may be the beginning of one."""
    tracer = Tracer()
    for step in recording.steps:
        tracer.read(step)
    ways = {row: way_of(answers) for row, answers in tracer.answers.items()}
    drafted = [work for row, answers in tracer.answers.items() for work in drafted_in(answers, ways[row])]
    passes = _with_tokens([passed_in(flight) for flight in tracer.flights], tracer)
    messages = [*tracer.small, *outward(tracer.asked, tracer.flights, ways), *inward(tracer, ways)]
    eras = [replace(era, end=tracer.now) if era is tracer.eras[-1] else era for era in tracer.eras]
    return Timeline(
        rows=tuple(Row(role, place) for role in Role for place in range(tracer.used[role])),
        works=tuple(sorted([*drafted, *passes], key=lambda work: work.begin)),
        messages=tuple(sorted(messages, key=lambda message: message.begin)),
        handled=tuple(tracer.handled),
        marks=tuple(tracer.marks),
        waits=tuple(tracer.waits),
        eras=tuple(eras),
        passes=tuple(asked.at for asked in tracer.asked if isinstance(asked.request, Pass)),
        end=tracer.now,
        figures=_figures(tracer, drafted, passes),
    )


def passed_in(flight: Flight) -> Work:
    """When a target's model worked on a pass."""
    asked = flight.asked
    assert isinstance(asked.request, Pass)
    way = _way_of_pass(flight)
    task = Task.MISS if asked.miss else Task.PASS
    return Work(asked.row, asked.at + way, flight.at - way, task, asked.epoch, len(asked.request.tree))


def _way_of_pass(flight: Flight) -> float:
    return max(0.0, flight.at - flight.asked.at - flight.seconds) / 2


def way_of(answers: Sequence[Answer], before: Sequence[float] = ()) -> float:
    """Half of the quickest answer to a new question, its model's time left out, or what was found `before`: seconds."""
    first = [one for one in answers if not one.late and not (isinstance(one.reply, Drafted) and one.reply.first)]
    found = (max(0.0, one.at - one.asked.at - one.reply.seconds) / 2 for one in first)
    return min((*before, *found), default=0.0)


def drafted_in(answers: Sequence[Answer], way: float, since: float = 0.0) -> list[Work]:
    """When a drafter's model worked, from its last reply back: it works on one thing at a time, not before `since`,
    and no reply leaves before its work is done."""
    works: list[Work] = []
    free = float("inf")
    for answer in reversed(answers):
        reply = answer.reply
        end = min(answer.at - way, free)
        earliest = since if answer.late else max(since, answer.asked.at)
        begin = free = max(end - reply.seconds, min(earliest, end))
        if isinstance(reply, Drafted):
            task = Task.BRANCHES if reply.branches else Task.DRAFT
            size, branches = len(reply.proposals), len(reply.branches)
        else:
            task, size, branches = Task.SCORE, len(reply.probabilities), 0
        works.append(Work(answer.asked.row, begin, end, task, reply.epoch, size, branches, late=answer.late))
    return works[::-1]


def _with_tokens(passes: list[Work], tracer: Tracer) -> list[Work]:
    """Each pass with the tokens that were emitted from its return to the next one's."""
    returned = [flight.at for flight in tracer.flights]
    tokens = [0] * len(passes)
    for handled in tracer.handled:
        if handled.tokens and passes:
            tokens[max(0, bisect_right(returned, handled.begin) - 1)] += len(handled.tokens)
    return [replace(work, tokens=count) for work, count in zip(passes, tokens, strict=True)]


def outward(asked: Iterable[Asked], flights: Iterable[Flight], ways: Mapping[Row, float]) -> Iterable[Message]:
    """What went to services; the way of a pass is known once it is back, and is 0 until then."""
    of_passes = {id(flight.asked): _way_of_pass(flight) for flight in flights}
    for one in asked:
        way = of_passes.get(id(one), 0.0) if isinstance(one.request, Pass) else ways.get(one.row, 0.0)
        yield Message(one.row, one.at, one.at + way, True, name_of(one.request), one.epoch)


def inward(tracer: Tracer, ways: Mapping[Row, float]) -> Iterable[Message]:
    """What services answered, but for what cost their models no time."""
    for flight in tracer.flights:
        asked = flight.asked
        assert isinstance(asked.request, Pass)
        text = f"rows of pass {asked.request.number}"
        yield Message(asked.row, flight.at - _way_of_pass(flight), flight.at, False, text, asked.epoch)
    for row, answers in tracer.answers.items():
        for answer in answers:
            text = name_of(answer.reply)
            yield Message(row, answer.at - ways[row], answer.at, False, text, answer.asked.epoch)


def _figures(tracer: Tracer, drafted: Sequence[Work], passes: Sequence[Work]) -> Figures:
    sent = [asked.at for asked in tracer.asked if isinstance(asked.request, Pass)]
    begin = sent[0] if sent else 0.0
    emitting = [handled for handled in tracer.handled if handled.tokens]
    seconds = emitting[-1].end - begin if emitting else 0.0
    whole = seconds * max(1, tracer.used[Role.TARGET]) or 1.0
    flying = sum(_covered([(one.asked.at, one.at) for one in flights]) for flights in _by_row(tracer.flights))
    happened = [mark.what for mark in tracer.marks]
    return Figures(
        seconds=seconds,
        tokens=sum(len(handled.tokens) for handled in emitting),
        passes=len(sent) + _further(tracer),
        row_misses=tracer.misses,
        refused=happened.count(Happening.REFUSED),
        hits=happened.count(Happening.HIT),
        stalls=happened.count(Happening.STALLED),
        model_share=_share(sum(work.end - work.begin for work in passes), whole),
        idle_share=_share(whole - flying, whole),
        drafter_share=_share(sum(work.end - work.begin for work in drafted), seconds or 1.0),
        verification_seconds=sum(handled.end - handled.begin for handled in tracer.handled),
        bytes=tracer.bytes,
    )


def _further(tracer: Tracer) -> int:
    """Forwards of runs after their first ones."""
    asked = {id(one) for one in tracer.asked}
    return sum(flight.forwards - (id(flight.asked) in asked) for flight in tracer.flights)


def _by_row(flights: Sequence[Flight]) -> list[list[Flight]]:
    rows = {flight.asked.row for flight in flights}
    return [[flight for flight in flights if flight.asked.row == row] for row in rows]


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """How much time the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))
