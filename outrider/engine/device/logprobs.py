"""Log-probabilities of emitted tokens on the device, for the sessions that request them.

The kernels that compute them are launched after the round, outside of its graph and without
synchronising, so rounds and rows without requests pay nothing. The logits processor works in place,
so the unprocessed logits of the requested rows are recomputed from the target's last hidden states.

Shapes: B decoding rows of the bucket, N nodes per row, K most probable ids.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.device.graphs.shapes import MAX_CHUNKS, RoundShape, bucket_for
from outrider.engine.device.inputs.prefill_chunks import PrefillChunkInputs
from outrider.engine.device.inputs.round_inputs import int32_zeros
from outrider.engine.device.round_program import RoundProgram, VerifyOutput
from outrider.engine.device.transfer.buffers import Downloader, PendingDownload, Uploader
from outrider.engine.kernels.runtime import next_power_of_2
from outrider.engine.logprobs import MAX_ROWS, PathLogprobs, split_paths, token_logprobs

TOP_BUCKETS: Final = (0, 5, 20)
"""Possible values of K, the number of most probable ids that a launch returns. There are few of
them, because results of each size have their own download buffers."""


class LogprobRequest(NamedTuple):
    """Rows and prefill chunks of a launch whose log-probabilities are requested."""

    rows: list[int]
    """Indices of the decoding rows with requests."""
    depth: int
    """Maximum number of tokens that any of these rows may emit."""
    chunks: list[int]
    """Indices of the prefill chunks with requests; a token is sampled after each."""
    top_counts: list[int]
    """Number of most probable ids to report for each of `rows`, and then for each of `chunks`."""


class PendingLogprobs(NamedTuple):
    """Log-probabilities whose download is in progress."""

    asked: LogprobRequest
    words: PendingDownload
    """int32 [at least the number of tokens, 1 + 2K]: for each token, the bits of the float32
    log-probabilities of the token and of the K most probable ids, followed by those ids."""
    depth: int
    """Number of tokens downloaded for each requested decoding row, including tokens that were not
    emitted."""

    def read_logprobs(self, counts: list[int]) -> list[PathLogprobs]:
        """Wait for the download, and return the log-probabilities of the requested rows, followed
        by those of the requested prefill chunks. `counts[i]`: number of tokens that requested row i
        emitted."""
        words: NDArray[np.int32] = self.words.wait_array()  # type: ignore[assignment]
        ids = words.shape[1] // 2
        values, top_ids = words[:, : 1 + ids].copy().view(np.float32), words[:, 1 + ids :].copy()
        asked = self.asked
        whole = [self.depth] * len(asked.rows) + [1] * len(asked.chunks)
        paths = split_paths(values, top_ids, list(zip(whole, asked.top_counts, strict=True)))
        paths[: len(counts)] = [
            path.first_tokens(count) for path, count in zip(paths, counts, strict=False)
        ]
        return paths


class RoundLogprobs:
    """Computes the requested log-probabilities of launched rounds."""

    def __init__(self, program: RoundProgram, *, max_rows: int, device: torch.device) -> None:
        """`max_rows`: maximum number of decoding rows of a launch."""
        self._program = program
        size = max_rows + MAX_CHUNKS
        self._places = int32_zeros(size, device)
        self._uploader = Uploader(size, device)
        self._downloads = Downloader(device)

    @torch.inference_mode()
    def start_logprobs(
        self,
        asked: LogprobRequest,
        shape: RoundShape,
        verified: VerifyOutput,
        chunks: PrefillChunkInputs | None,
        part: int = 0,
    ) -> PendingLogprobs:
        """Start to compute and download the requested log-probabilities. Call this after launch
        `part` of a round and before the next launch."""
        depth = min(asked.depth, shape.nodes)
        rows = self._upload(asked, part)
        places, tokens = self._tokens(asked, rows, depth, shape, verified, chunks)
        count, top = len(places), bucket_for(max(asked.top_counts), TOP_BUCKETS)
        more = max(MAX_ROWS, next_power_of_2(count)) - count
        places, tokens = F.pad(places, (0, more)), F.pad(tokens, (0, more))
        parts = []
        for first in range(0, count, MAX_ROWS):
            some = slice(first, first + MAX_ROWS)
            logits = self._program.target_logits(places[some])
            values, top_ids = token_logprobs(logits, tokens[some], top)
            parts.append(torch.cat((values.view(torch.int32), top_ids), dim=1))
        return PendingLogprobs(asked, self._downloads.start_download(torch.cat(parts), part), depth)

    def _upload(self, asked: LogprobRequest, part: int) -> Tensor:
        """Upload the requested rows, followed by the requested prefill chunks; return them as
        int64."""
        words = self._uploader.stage_int32s(part)
        rows_end, end = len(asked.rows), len(asked.rows) + len(asked.chunks)
        words[:rows_end] = asked.rows
        words[rows_end:end] = asked.chunks
        self._uploader.start_upload(self._places[:end])
        return self._places[:end].long()

    def _tokens(
        self,
        asked: LogprobRequest,
        named: Tensor,
        depth: int,
        shape: RoundShape,
        verified: VerifyOutput,
        chunks: PrefillChunkInputs | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the requested token rows of the forward, int64, and the token chosen at each,
        int64."""
        rows, ends = named[: len(asked.rows)], named[len(asked.rows) :]
        found: list[Tensor] = []
        chosen: list[Tensor] = []
        if asked.rows:
            acceptance = verified.acceptance
            assert acceptance is not None
            path = acceptance.rows.index_select(0, rows)[:, :depth]
            found.append((rows[:, None] * shape.nodes + path).flatten())
            # Places after the emitted tokens hold no token, and their values are not used.
            chosen.append(acceptance.tokens.index_select(0, rows)[:, :depth].flatten())
        if asked.chunks:
            assert chunks is not None and verified.first is not None
            found.append(shape.rows * shape.nodes + chunks.live_rows().index_select(0, ends))
            chosen.append(verified.first.index_select(0, ends))
        return torch.cat(found), torch.cat(chosen).long().clamp(min=0)
