"""RoundDrafter: protocol of drafters whose drafts the graphs of a round read on the verifier's
device.

Shapes: X session slots, n drafts per session, B sessions of a launch.
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
    """Protocol of a drafter whose drafts lie on the verifier's device, in tensors indexed by
    session slot.

    Its functions are recorded in CUDA graphs, so they launch kernels and read no values on the
    host.
    """

    @property
    def tokens(self) -> Tensor:
        """int32 [X, n]: the drafts that each session's next round verifies; -1 for absent nodes."""
        ...

    def parents_of(self, num_nodes: int) -> Tensor | None:
        """Return the parent of each node of the drafts, int32 [X, at least num_nodes - 1], for
        rounds with `num_nodes` nodes per row, including the root. X is the number of session slots:
        row x belongs to the session in slot x. Returns None if the drafts are chains."""
        ...

    @property
    def logits_slots(self) -> LogitsSlots | None:
        """State of the sessions' logits processor over the draft vocabulary; None if it is not kept
        on this device."""
        ...

    def receive_drafts(
        self, slots: Tensor, *, num_nodes: int, rejection: bool
    ) -> SparseDistribution | DenseChainDistribution | None:
        """Write the drafts of the sessions in `slots`, int32 [B], to `tokens`, and return the
        distributions that they were drawn from.

        Returns None if there are no distributions; sessions of the rejection rule then use the
        target-only rule. num_nodes: nodes per row, including the root. rejection: whether the round
        may have sessions of the rejection rule (see `AcceptanceMode.REJECTION`).
        """
        ...

    def flag_undrafted(self, flags: Tensor) -> Tensor:
        """Return the acceptance flags (`DeviceAcceptance.flags`), int32 [B], of the rows of the
        last `receive_drafts` call. A drafter on another device adds UNDRAFTED to the flags of rows
        for which it had no draft, because the host cannot know them."""
        ...

    def begin_rows(self) -> None:
        """Prepare for the new draft rows of one launch. The caller passes the rows of prefill
        chunks, if there are any, to `write_rows`. Then it passes the rows of decoding sessions to
        `draft_round`, which makes the drafts for their next round."""

    def write_rows(self, rows: NewRows) -> None:
        """Process draft rows of prompts after which nothing is drafted."""

    def draft_round(self, rows: NewRows, *, num_nodes: int, sampled: bool) -> None:
        """Process draft rows and draft after the last row of each session. num_nodes: nodes per row
        of the next round, including the root. sampled: whether any session may use the logits
        processor or need the distributions of its drafts."""
