"""Static input tensors of a bucket's decoding rows: session slots and drafts, uploaded by the host.

Shapes: B decoding rows of the bucket, N nodes per row, including the root.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.graphs.shapes import DraftKind
from outrider.engine.device.inputs.distribution_inputs import DistributionInputs
from outrider.engine.device.inputs.round_rows import RoundRows
from outrider.engine.device.transfer.buffers import Uploader
from outrider.engine.kernels.attention.layout import PADDING_NODE

NO_TOKEN = -1


class RoundInputs:
    """Static tensors with the session slots and drafts of a bucket's rows. Unused rows are
    padding."""

    def __init__(
        self,
        rows: int,
        nodes: int,
        distributions: DistributionInputs,
        *,
        padding: int,
        device: torch.device,
    ) -> None:
        """`distributions`: static memory for the distributions of remote drafts. `padding`: slot of
        padding rows."""
        self.distributions = distributions
        self._rows, self._drafted, self._padding = rows, nodes - 1, padding
        slots_end, drafts_end = rows, rows * nodes
        size = drafts_end + rows * self._drafted
        buffer = int32_zeros(size, device)
        self.slots = buffer[:slots_end]
        """int32 [B]: session slots."""
        self.drafts = buffer[slots_end:drafts_end].view(rows, self._drafted)
        """int32 [B, N - 1]: draft tokens; NO_TOKEN for absent nodes."""
        self.parents = buffer[drafts_end:].view(rows, self._drafted)
        """int32 [B, N - 1]: parents of the draft tokens; PADDING_NODE for absent nodes. Only set
        for trees."""
        # Inputs that a kind of round does not read are not uploaded.
        self._chains, self._trees = buffer[:drafts_end], buffer
        self._uploader = Uploader(size, device)
        self._sent_slots: list[int] | None = None
        """The slots of the last upload."""

    def fill_rows(self, rows: RoundRows, drafts: DraftKind, part: int = 0) -> None:
        """Upload the session slots and drafts of up to B rows, in stream order. The remaining rows
        of the bucket become padding. `drafts`: kind of the bucket's drafts; only drafts from the
        host are uploaded. `part`: index of this launch within its round."""
        slots = rows.slots
        if drafts is DraftKind.CHAIN or drafts is DraftKind.TREE:
            words = self._stage(slots, part)
            self._stage_drafts(words, rows, with_parents=drafts is DraftKind.TREE)
            self._uploader.start_upload(self._trees if drafts is DraftKind.TREE else self._chains)
        elif slots != self._sent_slots:
            self._stage(slots, part)
            self._uploader.start_upload(self.slots)
        self._sent_slots = slots

    def _stage(self, slots: list[int], part: int) -> NDArray[np.int32]:
        words = self._uploader.stage_int32s(part)
        words[: len(slots)] = slots
        words[len(slots) : self._rows] = self._padding
        return words

    def _stage_drafts(
        self, words: NDArray[np.int32], rows: RoundRows, *, with_parents: bool
    ) -> None:
        drafted = self._drafted
        grids = words[self._rows :].reshape(2, self._rows, drafted)
        grids[0] = NO_TOKEN
        if with_parents:
            grids[1] = PADDING_NODE
        count = len(rows.slots)
        if len(rows.tokens) == count * drafted:
            # Every draft has N - 1 nodes.
            grids[0, :count] = rows.tokens.reshape(count, drafted)
            if with_parents:
                grids[1, :count] = rows.parents.reshape(count, drafted)
            return
        cells = np.arange(drafted) < rows.counts[:, None]
        grids[0, :count][cells] = rows.tokens
        if with_parents:
            grids[1, :count][cells] = rows.parents


def int32_zeros(size: int, device: torch.device) -> Tensor:
    """Return a tensor of zeros, int32 [size], for static inputs. It can be written inside and
    outside of inference mode."""
    # Tensors made in inference mode could only be written in inference mode.
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.int32, device=device)
