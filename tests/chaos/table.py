"""The last words of a chaos run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.chaos.plan import BATCHES
from tests.chaos.run import Outcome

Sections = Sequence[tuple[str, Sequence[str]]]
"""What is shown of `Report.seen`, under which titles."""

_SECTIONS: Sections = (
    ("dealt", tuple(act.value for act in BATCHES.acts)),
    ("happened", ("kill", "stop", "stall_before", "cut", "cut_before", "swallow", "pg_crash")),
    ("effects", ("fence", "already_applied", "reclaim", "lost_identity", "retry", "final")),
    ("seen", ("accepted", "dispatch", "answer", "result", "export", "status")),
)


def table(outcome: Outcome, sections: Sections = _SECTIONS) -> str:
    plan, seen = outcome.plan, outcome.report.seen
    lines = [f"seed {plan.seed}, schedule {plan.digest}: {len(plan.actions)} actions in {plan.last_heal_s:.0f} s"]
    for title, names in sections:
        lines += _section(title, ((name, seen[name]) for name in names))
    lines += _section("run", sorted(outcome.figures.items()))
    lines += [f"problem: {problem}" for problem in outcome.problems]
    if not outcome.report.clean:
        lines.append(str(outcome.report))
    skipped = ", ".join(sorted(outcome.report.skipped)) or "none"
    lines.append(f"{_verdict(outcome)} after {outcome.seconds:.0f} s (invariants without events: {skipped})")
    return "\n".join(lines)


def _section(title: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{title if at == 0 else '':<10}{name:<22}{count:>10,}" for at, (name, count) in enumerate(rows)]


def _verdict(outcome: Outcome) -> str:
    if outcome.report.found or outcome.problems:
        return "NOT CLEAN"
    return "void" if outcome.report.missing else "clean"
