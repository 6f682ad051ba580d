"""What a governor believes and why it decides so, in lines for people."""

from collections.abc import Sequence

from crossdraft.pipeline.deciding import Decision
from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.governing import Choice


def believed(known: Estimates, decision: Decision | None) -> Sequence[str]:
    """Estimates, the best of each kind of way, and the decision."""
    lines = [
        f"acceptance {', '.join(f'{share:.2f}' for share in known.acceptance)} by place "
        f"({known.judged:.0f} proposals judged), after the target's own tokens {known.match:.2f} "
        f"({known.compared:.0f} compared)",
        f"drafter: {1e3 * known.token:.2f} ms a proposal, round trip {1e3 * known.drafter_trip:.2f} ms "
        f"({known.replies} replies), {known.tokens_per_proposal:.2f} tokens a proposal",
        f"target: {1e3 * known.pass_base:.2f} ms a pass and {1e3 * known.pass_node:.3f} ms a proposal, round trip "
        f"{1e3 * known.target_trip:.2f} ms ({known.passes} passes), while the drafter works "
        f"{1 / (1 - known.slowed):.2f} times as long; a plain token {1e3 * known.plain:.2f} ms; "
        f"{known.sessions:.1f} sessions share it, {1e3 * known.queue:.2f} ms in its queue",
        f"prepared continuations: {known.branch_hit:.2f} hit ({known.tried:.0f} tried), a further token costs "
        f"{known.slope:.2f} of a forward",
    ]
    if decision is None:
        return [*lines, "nothing decided yet: too little has been seen"]
    ranking = decision.ranking
    for name, rated in (
        ("plain decoding", ranking.plain),
        ("lock-step", ranking.rounds),
        ("overlapped, never waiting", ranking.hurried),
        ("best", ranking.best),
    ):
        lines.append(f"{name}: {rated.speed:.1f} tokens/s expected {_settings(rated.choice)}")
    return [*lines, f"decided: {decision.choice.reason}"]


def _settings(choice: Choice) -> str:
    if not choice.drafts:
        return ""
    if not choice.overlap:
        return f"with K = {choice.window}"
    branches = f", branches {choice.branch_depth} x {choice.branch_width}" if choice.branch_depth else ""
    patience = f", patience {1e3 * choice.patience:.1f} ms"
    replies = f", replies of {choice.chunk}{', speculating' * choice.speculate}"
    return f"with window {choice.window}, wait {choice.wait}{patience}{branches}{replies}"
