"""RoundDrafter protocol: what a round's graphs ask of whoever drafts on a device for its sessions.

X session slots, n drafts, B sessions of a launch.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
)


class RoundDrafter(Protocol):
    """A drafter whose drafts lie on the verifier's device, by session slot. Its functions are part
    of graphs: they launch kernels and look at no value on the host."""

    @property
    def tokens(self) -> Tensor:
        """int32 [X, n]: the drafts that each session's next round verifies; -1: no node."""
        ...

    def parents_of(self, num_nodes: int) -> Tensor | None:
        """int32 [X, >= num_nodes - 1]: parents of the drafts of rounds whose rows have so many
        nodes, the root included; None: chains."""
        ...

    @property
    def logits_slots(self) -> LogitsSlots | None:
        """What the sessions do to draft logits, where that is known on this device."""
        ...

    def receive_drafts(
        self, slots: Tensor, *, num_nodes: int, rejection: bool
    ) -> SparseDistribution | DenseChainDistribution | None:
        """Have the drafts of sessions, int32 [B], in `tokens` before their round reads them; the
        distributions that these were drawn from, None: the rejection rule judges them target-only.
        `num_nodes`: of a row, the root included.
        `rejection`: whether the shape is for rounds with sessions of that rule (see
        `AcceptanceMode.REJECTION`)."""
        ...

    def flag_undrafted(self, flags: Tensor) -> Tensor:
        """The flags int32 [B] of the rows whose drafts were received last, with UNDRAFTED added to
        those that the host cannot know to have none."""
        ...

    def begin_rows(self) -> None:
        """The rows of a launch follow: those of prompts, then those to draft behind."""

    def write_rows(self, rows: NewRows) -> None:
        """Take in rows whose prediction nobody wants."""

    def draft_round(self, rows: NewRows, *, num_nodes: int, sampled: bool) -> None:
        """Take in rows and draft behind the last one of each session, as many nodes as a row of the
        next round has with its root. sampled: whether any session
        may process its logits or need the distributions of its drafts."""
