"""GpuSmallModelProposer: small-model proposer on the GPU."""

from __future__ import annotations

from outrider.engine.target import TargetModel
from outrider.spec.plan import DraftMethod
from outrider_drafter.gpu.draft_model import make_small_model
from outrider_drafter.gpu.proposer import GpuProposer
from outrider_drafter.proposers.small_model import SmallModelProposer


class GpuSmallModelProposer(GpuProposer):
    """`GpuProposer` with a small language model.

    Drafts that the GPU graphs do not support come from a `SmallModelProposer`, whose KV is in the
    model's own pool.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        vocab_size: int,
        max_rows: int,
        max_context: int = 0,
        max_sessions: int = 1024,
        cuda_graphs: bool = True,
        bounded: bool = False,
        look_ahead: bool = True,
    ) -> None:
        """See `GpuProposer`. `model` must have no packed weights and no sliding window.
        `vocab_size`: size of the target's vocabulary."""

        def host() -> SmallModelProposer:
            return SmallModelProposer(model, vocab_size=vocab_size)

        super().__init__(
            DraftMethod.MODEL,
            make_small_model(model, vocab_size),
            host,
            max_rows=max_rows,
            max_context=max_context,
            max_sessions=max_sessions,
            dtype=model.dtype,
            device=model.device,
            cuda_graphs=cuda_graphs,
            bounded=bounded,
            look_ahead=look_ahead,
        )
