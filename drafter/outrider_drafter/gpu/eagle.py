"""GpuEagleProposer: EAGLE-3 proposer on the GPU."""

from __future__ import annotations

import torch

from outrider.engine.heads import DraftHead
from outrider.spec.plan import DraftMethod
from outrider_drafter.gpu.draft_model import make_eagle_model
from outrider_drafter.gpu.outcome_scoring import NUM_SWEEPS
from outrider_drafter.gpu.proposer import GpuProposer
from outrider_drafter.gpu.shapes import Buckets
from outrider_drafter.proposers.eagle import EagleProposer


class GpuEagleProposer(GpuProposer):
    """`GpuProposer` with an EAGLE-3 head. Drafts that the GPU graphs do not support come from an
    `EagleProposer`."""

    def __init__(
        self,
        head: DraftHead,
        *,
        max_rows: int,
        max_context: int = 0,
        max_sessions: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        cuda_graphs: bool = True,
        bounded: bool = False,
        buckets: Buckets | None = None,
        look_ahead: bool = True,
        sweeps: int = NUM_SWEEPS,
    ) -> None:
        """See `GpuProposer`. `buckets`: sizes of the captured graphs; None for the default sizes.
        Raises FailedPreconditionError if the head is not an EAGLE-3 head or if its weights are
        packed."""
        self.head = head

        def host() -> EagleProposer:
            return EagleProposer(
                head, max_rows=max_rows, max_context=max_context, dtype=dtype, device=device
            )

        super().__init__(
            DraftMethod.EAGLE3,
            make_eagle_model(head, buckets),
            host,
            max_rows=max_rows,
            max_context=max_context,
            max_sessions=max_sessions,
            dtype=dtype,
            device=device,
            cuda_graphs=cuda_graphs,
            bounded=bounded,
            look_ahead=look_ahead,
            sweeps=sweeps,
        )
