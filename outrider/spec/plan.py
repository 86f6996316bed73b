"""Speculation plan of a session: draft method, tree shape and look-ahead (torch-free).

The router chooses the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.errors import InvalidRequestError

MAX_DRAFT_TOKENS = 256
MAX_DRAFT_TOP_K = 32
MAX_PROPOSAL_TIMEOUT_MS = 60_000
MAX_LOOK_AHEAD = 1
"""Maximum number of rounds that may be drafted ahead. Two rounds would need drafts for every
outcome of every outcome, which costs too much."""
MAX_FAN_OUT = 64


def default_depth(num_nodes: int) -> int:
    """Return the default number of levels of a tree of `num_nodes` nodes: 4 for 7 nodes, 5 for 16,
    6 for 32, 7 for 64.

    With fewer levels, drafting is cheaper, but the loss of acceptance is larger than the saving.
    With trees of 7 nodes, SmolLM2-135M emits 3.10 tokens per round with 3 levels and 3.37 with 4 at
    temperature 0 (14 prompts, 80 tokens).
    """
    return max(2, (num_nodes + 1).bit_length())


def tree_depth(num_nodes: int, depth: int) -> int:
    """Return the number of levels of a tree with `num_nodes` nodes: `depth`, or the default if
    `depth` is 0, but at most `num_nodes`."""
    return min(depth or default_depth(num_nodes), num_nodes)


class DraftMethod(StrEnum):
    """Source of a session's drafts."""

    NONE = "none"
    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    NGRAM = "ngram"
    MODEL = "model"


_NONE: Final = DraftMethod.NONE
"""Cached member, because rounds compare it for every session and an enum lookup is slow."""
FEATURE_METHODS = (DraftMethod.EAGLE3, DraftMethod.EAGLE)
"""Draft methods that use hidden states of the target; all other methods use only tokens."""


def default_method(offered: Sequence[DraftMethod]) -> DraftMethod | None:
    """Return the draft method of requests that name none. `offered` are the methods of the fleet.

    Returns None if the fleet offers eagle3 or nothing. The router then uses its default, eagle3.
    """
    return None if not offered or DraftMethod.EAGLE3 in offered else offered[0]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message, reason="INVALID_PLAN")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Speculation settings of one session."""

    method: DraftMethod = DraftMethod.NONE
    """Draft method; `none` decodes without drafts."""
    draft_tokens: int = 4
    """Number of nodes of a proposal, without the root, in [0, 256]."""
    top_k: int = 1
    """Number of children of an expanded node, in [1, 32]; 1 drafts a chain."""
    depth: int = 0
    """Number of levels of a tree; 0 lets the drafter choose. A chain always has draft_tokens
    levels."""
    look_ahead: int = 0
    """Number of rounds that are drafted ahead of the verdict, in [0, 1]; with 0, drafting waits for
    each verdict. If the verifier's planner decides, 1 allows look-ahead but does not force it."""
    fan_out: int = 0
    """Number of predicted outcomes per round for which drafts are made ahead if look_ahead > 0, in
    [0, 64]; 0 lets the drafter choose."""
    proposal_timeout_ms: int = 1000
    """Maximum time in milliseconds that a session waits for its proposal before it decodes without
    drafts."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.draft_tokens <= MAX_DRAFT_TOKENS,
            f"draft_tokens must be in [0, {MAX_DRAFT_TOKENS}], got {self.draft_tokens}",
        )
        _require(
            1 <= self.top_k <= MAX_DRAFT_TOP_K,
            f"top_k must be in [1, {MAX_DRAFT_TOP_K}], got {self.top_k}",
        )
        _require(
            0 <= self.depth <= MAX_DRAFT_TOKENS,
            f"depth must be in [0, {MAX_DRAFT_TOKENS}], got {self.depth}",
        )
        _require(
            0 <= self.look_ahead <= MAX_LOOK_AHEAD,
            f"look_ahead must be in [0, {MAX_LOOK_AHEAD}], got {self.look_ahead}",
        )
        _require(
            0 <= self.fan_out <= MAX_FAN_OUT,
            f"fan_out must be in [0, {MAX_FAN_OUT}], got {self.fan_out}",
        )
        _require(
            0 <= self.proposal_timeout_ms <= MAX_PROPOSAL_TIMEOUT_MS,
            f"proposal_timeout_ms must be in [0, {MAX_PROPOSAL_TIMEOUT_MS}], "
            f"got {self.proposal_timeout_ms}",
        )

    @property
    def is_speculative(self) -> bool:
        """Whether the session uses drafts."""
        return self.method is not _NONE and self.draft_tokens > 0
