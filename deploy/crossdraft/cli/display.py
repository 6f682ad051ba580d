"""How a generation is shown: coloured text and a table of figures, or a line of JSON for each token."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from crossdraft.cli.running import PlainConsole
from crossdraft.client import Generation, Kind, Reason, Statistics, Token
from crossdraft.serving.grpc_client import RemoteGeneration
from crossdraft.trace.timeline import Span, What

Generated = Generation | RemoteGeneration
RATIOS = tuple(name for name, value in vars(Statistics).items() if isinstance(value, property))
STYLES = {Kind.ACCEPTED: Style(color="green"), Kind.CORRECTED: Style(color="red"), Kind.BONUS: Style(color="cyan")}
LEGEND = (
    "accepted (agrees with the draft)  corrected (in place of a refused draft token)  "
    "bonus (while there was no draft token to judge)"
)
TAKEN = "taken from the draft"  # a row of figures
ROUNDS = "draft tokens"
NUMBERS = {"q": "the drafter's probability", "p": "the target's", "chance": "of being accepted"}  # of draft tokens
UNDRAFTED = "none was judged (with a drafter and --overlap off each round has some)"
DECISIONS = 8  # of an output, at its beginning and at its end, that are explained
POSITIONS = 8  # of a round, for which acceptance is shown
MEANINGS = {  # of rows of figures whose names do not say it
    "tokens": "accepted: as drafted; corrected: in place of a refused draft token; bonus: no draft token was there",
    "passes of the target": "forward passes; a row miss is one more, where no guessed path was right",
    "tokens per pass": "1 without a drafter",
    TAKEN: "accepted, of the tokens for which a draft token was there in time",
    "draft tokens that agree": "with the output; late ones came after the target had decided",
    "... by position": "the share that agrees of the first draft token of a round, of the second, and so on",
    "on the wire": "waiting for a service, less its time in the model",
    "target idle": "without a pass to make",
    "verification": "the processor's time in this process for deciding which draft tokens are accepted",
    "rewinds": "the drafter went back after a refusal; an epoch is the life of one draft",
    "prepared continuations": "drafted ahead, in case a draft token is refused",
    "prepared continuations used": "refusals after which the text went on as one of them did",
    "stalls": "no draft token came in time, and the target's own was taken",
    "speculated passes": "sent to a second target before the pass before them was back",
}
# Control characters of a model's text would act on the terminal: their Unicode pictures are shown instead.
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}


@dataclass(eq=False)
class TextScreen:
    """Text on stdout, coloured on a terminal and unchanged elsewhere; legend and figures on stderr."""

    out: Console = field(default_factory=lambda: PlainConsole(highlight=False))
    notes: Console = field(default_factory=lambda: PlainConsole(stderr=True, highlight=False))
    audit: bool = False  # whether to show the audit, also if it checked nothing
    verbose: bool = False  # whether to say what the figures mean, and what became of draft tokens

    def begin(self, prompt: str) -> None:
        """On a terminal the prompt comes first."""
        if self.out.is_terminal:
            self._write(prompt, Style(dim=True))

    def token(self, token: Token) -> None:
        self._write(token.text, STYLES[token.kind])

    def end(self, generation: Generated) -> None:
        """The figures, with why the output ended."""
        self.out.print()
        self.notes.print()  # text that goes through a pipe may come late: the figures have a line of their own
        if self.out.color_system is not None:
            self.notes.print(legend())
        if generation.statistics is not None:
            ended = ending(generation.reason, generation.statistics)
            self.notes.print(figures(generation.statistics, self.audit, ended))
            for name, _ in rows_of(generation.statistics) + events_of(generation.statistics) if self.verbose else ():
                if name in MEANINGS:
                    self.notes.print(Text(f"{name}: {MEANINGS[name]}"), soft_wrap=True)
        for line in explanation_of(generation) if generation.decisions else ():
            self.notes.print(Text(line), soft_wrap=True)

    def rounds(self, spans: Sequence[Span]) -> None:
        """What became of each draft token."""
        judged = sorted((span for span in spans if span.what is What.JUDGED), key=lambda one: one.begin)
        labels = " ".join(one.label for one in judged)
        numbers = [f"{name}: {what}" for name, what in NUMBERS.items() if f" {name} " in labels]
        begin = f"{ROUNDS} ({', '.join(numbers)}):" if numbers else f"{ROUNDS}:"
        epochs = groupby(judged, lambda one: one.epoch)
        lines = ["\n  ".join([f"epoch {epoch}:", *(one.label for one in ones)]) for epoch, ones in epochs]
        self.notes.print(Text("\n".join([begin, *(lines or [UNDRAFTED])])), soft_wrap=True)

    def _write(self, text: str, style: Style) -> None:
        # As a segment, because a rich Text would widen tabs and drop carriage returns.
        shown = text.translate(VISIBLE) if self.out.is_terminal else text
        self.out.print(Segments([Segment(shown, style)]), end="", soft_wrap=True)


class JsonScreen:
    """One object for each token, then one with text, ids, reason and statistics."""

    def begin(self, prompt: str) -> None:
        """Prints nothing."""

    def token(self, token: Token) -> None:
        """Id, text, kind and log-probability (null when the method draws from rows)."""
        shown = {"id": token.id, "text": token.text, "kind": token.kind.value}
        self._write(shown | {"log_probability": token.log_probability})

    def end(self, generation: Generated) -> None:
        """The last object."""
        statistics, reason = generation.statistics, generation.reason
        ratios = {name: getattr(statistics, name, None) for name in RATIOS}
        record: dict[str, object] = {
            "text": generation.text,
            "ids": generation.ids,
            "reason": None if reason is None else reason.value,
            "statistics": None if statistics is None else asdict(statistics) | ratios,
        }
        if generation.decisions:
            record["decisions"] = [asdict(decision) for decision in generation.decisions]
            record["estimates"] = list(generation.estimates)
        self._write(record)

    def _write(self, record: dict[str, object]) -> None:
        print(json.dumps(record), flush=True)


Screen = TextScreen | JsonScreen


def legend() -> Text:
    """What the colours mean, in one line."""
    line = Text(LEGEND)
    for kind, style in STYLES.items():
        line.highlight_words([kind.value], style)
    return line


def ending(reason: Reason | None, statistics: Statistics) -> str:
    """Why an output ended, in words."""
    if reason is Reason.LENGTH:
        return "context full" if statistics.tokens < statistics.settings.get("max_tokens", 0) else "max tokens"
    return "end of sequence, or what was to stop it" if reason is Reason.STOP else ""


def figures(statistics: Statistics, audit: bool = False, ended: str = "") -> Table:
    """The table of one generation; `audit`: with the audit, also if it checked nothing; `ended`: why, if known."""
    k = statistics.num_speculative_tokens
    title = statistics.method + (f", K = {k}" if k else "")
    more = (
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in statistics.settings.items())),
        ("ended", ended),
        ("audited", f"{statistics.audited} draft tokens were drawn from their rows" * audit),
        ("drafter", undrafted(statistics)),
        ("last drafter lost" if statistics.drafters_lost else "drafter", statistics.drafter_lost),
    )
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows_of(statistics) + events_of(statistics) + [row for row in more if row[1]]:
        table.add_row(name, Text(value))
    return table


def rows_of(statistics: Statistics) -> list[tuple[str, str]]:
    """Names and values of the figures of every generation."""
    kinds = f"{statistics.accepted} accepted, {statistics.corrected} corrected, {statistics.bonus} bonus"
    return [
        ("tokens", f"{statistics.tokens} ({kinds})"),
        ("passes of the target", f"{statistics.passes} ({statistics.row_misses} row misses)"),
        ("tokens per pass", f"{statistics.tokens_per_pass:.2f}"),
        (TAKEN, taken(statistics)),
        ("draft tokens that agree", f"{statistics.accepted_length:.2f} per round, late ones included"),
        ("... by position", positions(statistics) or "nothing verified"),
        ("tokens/s", f"{statistics.tokens_per_second:.1f}"),
        ("time", f"{statistics.seconds:.2f} s (first token after {statistics.first_token_seconds:.2f} s)"),
        ("in the drafter", f"{statistics.drafter_seconds:.2f} s"),
        ("in the target", f"{statistics.target_seconds:.2f} s"),
        ("on the wire", f"{statistics.wire_seconds:.2f} s"),
        ("target idle", f"{statistics.idle_share:.0%} of the time"),
        ("verification", f"{statistics.verification_seconds:.3f} s ({statistics.round_milliseconds:.2f} ms per pass)"),
        ("bytes", f"{statistics.bytes_sent:,} sent, {statistics.bytes_received:,} received"),
        ("bytes per token", f"{statistics.bytes_per_token:,.0f}"),
    ]


def events_of(statistics: Statistics) -> list[tuple[str, str]]:
    """Names and values of events that occurred; those that did not are left out."""
    branches = f"{statistics.branches} with {statistics.branch_tokens} draft tokens"
    hits = f"{statistics.branches_hit} of {statistics.branches_tried} rejections ({statistics.branch_hits:.0%})"
    rows = (
        (statistics.rewinds, "rewinds", f"{statistics.rewinds} in {statistics.epochs} epochs"),
        (statistics.branches, "prepared continuations", branches),
        (statistics.branches_tried, "prepared continuations used", hits),
        (statistics.stalls, "stalls", f"the target stopped waiting for draft tokens {statistics.stalls} times"),
        (statistics.speculated, "speculated passes", str(statistics.speculated)),
        (statistics.drafters_lost, "drafters lost", str(statistics.drafters_lost)),
        (statistics.targets_lost, "targets lost", str(statistics.targets_lost)),
    )
    return [(name, value) for count, name, value in rows if count]


def explanation_of(generation: Generated) -> list[str]:
    """The lines of --explain: the controller's decisions with time and reason, then its estimates at the end."""
    decisions, epochs = generation.decisions, sum(one.epochs for one in generation.decisions)
    lines = [f"{epochs} epoch{'s' * (epochs != 1)}:"]
    for number, decision in enumerate(decisions):
        if number == DECISIONS < len(decisions) - DECISIONS:
            lines.append(f"  … {len(decisions) - 2 * DECISIONS} more decisions; --json has all")
        if number < DECISIONS or number >= len(decisions) - DECISIONS:
            choice, count = decision.choice, f"{decision.epochs} epoch{'s' * (decision.epochs != 1)}"
            lines.append(f"  after {decision.seconds:.3f} s, {count}: {choice.settings}; {choice.reason}")
    if generation.statistics is not None and (why := undrafted(generation.statistics)):
        lines.append(f"  {why}")
    if generation.estimates:
        lines.append("what the controller decided from last, for all outputs on this target:")
        lines += [f"  {line}" for line in generation.estimates]
    return lines


def undrafted(statistics: Statistics) -> str:
    """Why the drafter drafted nothing, or less than it was asked for; empty if it drafted all, or was lost."""
    why, times = statistics.undrafted, statistics.stood_aside
    return f"stood aside {times} times, the last time because {why}" if times else why and f"drafted nothing: {why}"


def taken(statistics: Statistics) -> str:
    """The share of tokens that a draft token decided, of those for which there was one in time."""
    if not statistics.draft_tokens:
        return "nothing: there was no draft token"
    judged = statistics.accepted + statistics.corrected
    return f"{statistics.acceptance:.1%} of {judged}" if judged else "none: no draft token came in time"


def positions(statistics: Statistics) -> str:
    """The share of draft tokens that agreed at each of a round's first positions, of those that were verified there."""
    shares = zip(statistics.acceptance_at, statistics.judged_at, strict=True)
    shown = [f"{share:.0%}" for share, judged in shares if judged]
    return " ".join(shown[:POSITIONS] + ["…"] * (len(shown) > POSITIONS))
