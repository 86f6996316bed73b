"""Writes the KV of a session's catch-up rows with graphs that are captured for a few sizes.

No logits are computed for these rows. Letters in shapes: m rows of a write; H feature width.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import DraftForward, NewRows
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shapes import bucket_for
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.proposers.kv_proposer import MAX_ROWS_PER_WRITE, to_raw_array

WRITE_BUCKETS: Final = (64, 256, MAX_ROWS_PER_WRITE)
_WORDS: Final = 3
"""Number of int32 words before the tokens: device slot, count, start."""


class KVRowWriter:
    """Writes KV rows of the draft model: fills static inputs from the host and launches a captured
    graph."""

    def __init__(
        self,
        forward: DraftForward,
        rows: PagedDraftKV,
        graphs: GraphCache,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward, self._rows, self._graphs = forward, rows, graphs
        self._cuda = device.type == "cuda"
        size = _WORDS + MAX_ROWS_PER_WRITE
        self._words = torch.zeros(size, dtype=torch.int32, device=device)
        shape = (MAX_ROWS_PER_WRITE, forward.feature_size)
        self._features = torch.zeros(shape, dtype=dtype, device=device)
        self._staged_words = torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda)
        self._staged = torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)
        self._staged_array = to_raw_array(self._staged)
        self._uploaded = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
        """Event after which the staging memory may be written again; None on a CPU."""

    def warm_up(self) -> None:
        """Compile the kernels and capture the graph of every size in `WRITE_BUCKETS`."""
        for size in WRITE_BUCKETS:
            self._run(self._rows.padding, 0, np.empty(0, np.int32), self._staged_array[:0], size)

    def write_rows(
        self,
        seat: int,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        """Write m KV rows of the session in device slot `seat`, from row `start` on. `tokens` [m]:
        token of each row. `features` [m, H]: feature of each row, in the format of
        `to_raw_array`."""
        self._run(seat, start, tokens, features, bucket_for(len(tokens), WRITE_BUCKETS))

    def _run(
        self,
        seat: int,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
        size: int,
    ) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()
        count, words = len(tokens), self._staged_words.numpy()
        words[:_WORDS] = seat, count, start
        words[_WORDS : _WORDS + count] = tokens
        words[_WORDS + count : _WORDS + size] = -1
        self._staged_array[:count] = features
        self._words.copy_(self._staged_words, non_blocking=True)
        self._features[:count].copy_(self._staged[:count], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()
        self._graphs.run_graph(
            ("write", size), lambda: self._forward.write_rows(self._new_rows(size))
        )

    def _new_rows(self, size: int) -> NewRows:
        words: Tensor = self._words
        return NewRows(
            slots=words[0:1],
            tables=self._rows.tables,
            tokens=words[_WORDS : _WORDS + size].view(1, size),
            features=self._features[None, :size],
            counts=words[1:2],
            starts=words[2:3],
        )
