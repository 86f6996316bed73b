"""Report of a fault run against a fleet: counts, gaps, errors and violations. It does no I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from outrider.chaos.checker import CheckViolation
from outrider.chaos.history import ClientHistory, StreamResult
from outrider.errors import OutriderError


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value v such that at least `share` of the values are at most v. Return 0
    if there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def describe(
    histories: Sequence[ClientHistory], violations: Sequence[CheckViolation], faults: Sequence[str]
) -> str:
    """Return the text of a report: numbers of requests, gaps between messages, faults, errors and
    violations."""
    gaps = [gap for history in histories for gap in history.gaps[1:]]
    firsts = [history.gaps[0] for history in histories if history.heard]
    ends = Counter(str(history.end) for history in histories)
    errors = Counter(
        _name(history.error) for history in histories if history.end is not StreamResult.FINISHED
    )
    texts = sum(violation.promise in ("text", "end") for violation in violations)
    lines = [
        f"{len(histories)} requests: {_counts(ends)}",
        f"texts that are not those of a calm run: {texts}",
        f"gaps between messages: p50 {1000 * quantile(gaps, 0.5):.1f} ms, "
        f"p99 {1000 * quantile(gaps, 0.99):.1f} ms, longest {max(gaps, default=0.0):.2f} s",
        f"first messages: p50 {1000 * quantile(firsts, 0.5):.1f} ms, "
        f"p99 {1000 * quantile(firsts, 0.99):.1f} ms",
        f"faults: {len(faults)}",
        *(f"  {fault}" for fault in faults),
    ]
    if errors:
        lines.append(f"errors: {_counts(errors)}")
    return "\n".join([*lines, *(f"VIOLATION {violation}" for violation in violations)])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))


def _name(error: BaseException | None) -> str:
    if isinstance(error, OutriderError):
        return f"{type(error).__name__} ({error.reason})"
    return type(error).__name__
