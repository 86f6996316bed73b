"""Sessions that look ahead, and the outcomes that are drafted for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import extend_digests
from outrider.spec.tree import DraftTree
from outrider_drafter.state.outcomes import Floats, Indices, Layout
from outrider_drafter.state.session import Session


class Expected(NamedTuple):
    """Outcomes that are to be drafted for; [K] each."""

    lives: Indices
    nodes: Indices
    tokens: NDArray[np.int32]
    above: NDArray[np.uint64]
    """Prefix digests at their nodes."""
    lengths: Indices
    """Of the prefixes that they make."""
    gains: Floats

    def digests(self) -> NDArray[np.uint64]:
        """Of the prefixes that they make."""
        return extend_digests(self.above, self.tokens)

    def only(self, which: Indices | slice) -> Expected:
        """Some of them, in this order."""
        return Expected(
            self.lives[which],
            self.nodes[which],
            self.tokens[which],
            self.above[which],
            self.lengths[which],
            self.gains[which],
        )


class ScoredLive(NamedTuple):
    """One of the live proposals that were scored together."""

    layout: Layout
    logprobs: NDArray[np.float32]
    """[P, c] of the candidates."""
    proposal: int
    """Its place among them."""


@dataclass(slots=True, eq=False)
class Watched:
    """A session that looks ahead."""

    session: Session
    tree: DraftTree | None = None
    """The live proposal; None while there is none."""
    length: int = 0
    """Tokens of the prefix that it continues."""
    since: float = 0.0
    """When it was sent, or was found to be a hit, seconds."""
    is_hit: bool = False
    """Whether it was made ahead."""
    scored: ScoredLive | None = None
    """What is known of it, once it was scored."""
    branches: dict[int, DraftTree] = field(default_factory=dict)
    """What was sent for outcomes of the live proposal, by prefix digest."""
    covered: float = 0.0
    """Probability that the next verdict is one of these."""
    pending: int = 0
    """Outcomes that were chosen and not drafted for yet."""

    def take_up(self, tree: DraftTree | None, now: float, *, is_hit: bool = False) -> None:
        """There is another live proposal, for the session's present prefix."""
        self.tree, self.length = tree, len(self.session.tokens)
        self.since, self.is_hit = now, is_hit
        self.scored, self.branches = None, {}
        self.covered, self.pending = 0.0, 0
