"""Text in which a verifier reports the choices of its speculation controller, and its parser.
`VerifierInfo.planner` holds the choices, separated by `SEPARATOR`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from outrider.spec.decoding_mode import DecodingModeReason

SEPARATOR: Final = "; "
IN_PROCESS_DRAFTS: Final = "in-process drafts"
"""First words of the description of sessions whose drafts the verifier makes itself."""
_CHOICE: Final = re.compile(
    r"(?P<sessions>[^:;]{1,200}): "
    r"(?:plain|(?P<kind>chain|tree) of (?P<tokens>\d{1,4})(?P<ahead>, look-ahead)?)"
    rf" \((?P<reason>{'|'.join(DecodingModeReason)})(?:, (?P<gain>\d{{1,6}}\.\d\d)x of plain)?\)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChoice:
    """Drafts that the speculation controller has chosen for sessions of one kind."""

    sessions: str
    """Description of the sessions, such as "eagle3 chain of 4, greedy, T 0.0"."""
    draft_tokens: int
    """Number of draft tokens per round; 0 if the sessions decode without drafts."""
    is_tree: bool = False
    is_look_ahead: bool = False
    """Whether the drafts are made before the verdict of the previous round."""
    reason: DecodingModeReason
    gain: float = math.nan
    """Tokens per second with drafts, divided by those without; nan if unknown. If `draft_tokens` is
    0, it is the gain that drafts would have.
    """

    def __str__(self) -> str:
        shape = "plain"
        if self.draft_tokens:
            kind = "tree" if self.is_tree else "chain"
            shape = f"{kind} of {self.draft_tokens}{', look-ahead' * self.is_look_ahead}"
        gain = "" if math.isnan(self.gain) else f", {self.gain:.2f}x of plain"
        return f"{self.sessions}: {shape} ({self.reason}{gain})"


def parse_choices(text: str) -> tuple[SpeculationChoice, ...]:
    """Return the choices in a text in which `SEPARATOR` joins them. Parts that are no whole choice
    are left out, such as the last one of a text that was cut at a limit.
    """
    found = map(_CHOICE.fullmatch, text.split(SEPARATOR))
    return tuple(_choice(match) for match in found if match is not None)


def _choice(match: re.Match[str]) -> SpeculationChoice:
    return SpeculationChoice(
        sessions=match["sessions"],
        draft_tokens=int(match["tokens"] or 0),
        is_tree=match["kind"] == "tree",
        is_look_ahead=match["ahead"] is not None,
        reason=DecodingModeReason(match["reason"]),
        gain=float(match["gain"] or math.nan),
    )
