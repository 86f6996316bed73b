"""A head's drafts on a device, which is the CPU in these tests."""

from __future__ import annotations

import torch
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.gpu.shapes import Buckets

from outrider.engine.heads import DraftHead


def on_device(
    head: DraftHead,
    *,
    max_rows: int = 8192,
    max_context: int = 256,
    bounded: bool = False,
    buckets: Buckets | None = None,
    look_ahead: bool = True,
    sweeps: int = 64,
) -> GpuEagleProposer:
    """A source of at most 16 sessions in float32; with so many sweeps scores are exact."""
    return GpuEagleProposer(
        head,
        max_rows=max_rows,
        max_context=max_context,
        max_sessions=16,
        dtype=torch.float32,
        device="cpu",
        bounded=bounded,
        buckets=buckets,
        look_ahead=look_ahead,
        sweeps=sweeps,
    )
