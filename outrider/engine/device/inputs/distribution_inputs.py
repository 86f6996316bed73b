"""Uploads the draft distributions that drafter processes send into static device memory.

Shapes: B decoding rows of a bucket, N nodes per row, including the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.buffers import Uploader
from outrider.engine.device.trial_capture import outside_capture
from outrider.engine.draft_sampling import MAX_DISTRIBUTION_ENTRIES
from outrider.engine.kernels.acceptance.randomized import SparseDistribution
from outrider.spec.draft_distribution import DraftDistribution

MAX_FULL_DISTRIBUTIONS: Final = 64
"""Memory is reserved for the distributions of at most this number of rows, each of the maximum
size."""
_STEP: Final = 4096
"""Entries are uploaded in multiples of this number, so that uploads have few sizes."""


class DistributionInputs:
    """Static memory for the draft distributions of one launch, shared by the graphs of all shapes.

    The entries (token ids and counts) of all distributions lie one after another. Each bucket has a
    tensor of offsets, which tell its graph where the entries of each node are. Distributions that
    do not fit are left out, and their rows use the target-only rule.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        """`max_rows`: maximum number of rows of a launch that may have distributions."""
        capacity = min(max_rows, MAX_FULL_DISTRIBUTIONS) * MAX_DISTRIBUTION_ENTRIES
        self._device = device
        self._ids, self._counts = _zeros((capacity,), device), _zeros((capacity,), device)
        self._id_uploads, self._count_uploads = (Uploader(capacity, device) for _ in range(2))
        self._offsets: dict[tuple[int, int], _Offsets] = {}

    def distribution_of(self, rows: int, nodes: int) -> SparseDistribution:
        """Return the static tensors from which the graph of a bucket reads distributions. The
        bucket has B = `rows` rows with N = `nodes` nodes each."""
        offsets = self._offsets_of(rows, nodes).tensor
        return SparseDistribution.of_offsets(self._ids, self._counts, offsets)

    def fill_distributions(
        self,
        distributions: Sequence[DraftDistribution | None],
        rows: int,
        nodes: int,
        part: int = 0,
    ) -> None:
        """Upload the distributions of the first n <= B rows of a bucket, in stream order.

        `distributions`: the distributions of each row's draft, which has fewer than N nodes; None
        for a row without distributions. `rows`: B. `nodes`: N. `part`: index of this launch within
        its round.
        """
        offsets = self._offsets_of(rows, nodes)
        held = self._assigned(distributions) if distributions else []
        if not held:
            offsets.clear(part)
            return
        ids, counts = self._id_uploads.stage_int32s(part), self._count_uploads.stage_int32s(part)
        words = offsets.stage(part)
        used = 0
        for row, distribution in held:
            end = used + len(distribution.ids)
            ids[used:end], counts[used:end] = distribution.ids, distribution.counts
            known = len(distribution.offsets)
            words[row, :known] = distribution.offsets
            words[row, known:] = len(distribution.ids)
            words[row] += used
            used = end
        sent = min(-(-used // _STEP) * _STEP, len(ids))
        self._id_uploads.start_upload(self._ids[:sent])
        self._count_uploads.start_upload(self._counts[:sent])
        offsets.send()

    def _assigned(
        self, distributions: Sequence[DraftDistribution | None]
    ) -> list[tuple[int, DraftDistribution]]:
        """Return the distributions that fit into the memory, with their row indices."""
        held, room = [], len(self._ids)
        for row, distribution in enumerate(distributions):
            if distribution is not None and 0 < len(distribution.ids) <= min(
                room, MAX_DISTRIBUTION_ENTRIES
            ):
                held.append((row, distribution))
                room -= len(distribution.ids)
        return held

    def _offsets_of(self, rows: int, nodes: int) -> _Offsets:
        found = self._offsets.get((rows, nodes))
        if found is None:
            with outside_capture(self._device):
                found = self._offsets[rows, nodes] = _Offsets(rows, nodes, self._device)
        return found


class _Offsets:
    """Static offsets of a bucket's nodes into the entries, int32 [B, N + 1]; all 0 for a row
    without a distribution."""

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        self.tensor = _zeros((rows, nodes + 1), device)
        self._flat = self.tensor.view(-1)
        self._uploads = Uploader(self.tensor.numel(), device)
        self._empty = True

    def stage(self, part: int) -> NDArray[np.int32]:
        """Return zeros [B, N + 1] to fill before the next `send`."""
        words = self._uploads.stage_int32s(part).reshape(self.tensor.shape)
        words[:] = 0
        self._empty = False
        return words

    def send(self) -> None:
        """Upload the staged offsets."""
        self._uploads.start_upload(self._flat)

    def clear(self, part: int) -> None:
        """Set all offsets to 0, for a launch without distributions."""
        if not self._empty:
            self.stage(part)
            self.send()
            self._empty = True


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    # Tensors made in inference mode could only be written in inference mode.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.int32, device=device)
