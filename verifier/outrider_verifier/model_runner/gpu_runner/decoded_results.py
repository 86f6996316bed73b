"""Decodes the result words of a GPU launch into accepted tokens, features and log-probabilities.

A row is a decoding session of the launch. In shapes, n is the number of rows, N the number of nodes
per row that the launch verifies (including the root), and H the feature width. The result of a row
has 2 + 2N words: the number of accepted nodes (including the root), flags, N words for the indices
of the accepted nodes, and N words for the token that follows each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.round_launcher import LaunchedRound
from outrider.engine.kernels.acceptance.matching import (
    INVALID_OUTPUT,
    TARGET_ONLY_FALLBACK,
    UNDRAFTED,
)
from outrider.engine.logprobs import PathLogprobs
from outrider_verifier.exchange.shm_features import ShmFeatures
from outrider_verifier.model_runner.gpu_runner.launch_groups import LaunchGroup
from outrider_verifier.model_runner.interface import DecodeOutput, RowOutput


class LaunchResults(NamedTuple):
    """Results of a launch group's rows. They must be read before their memory is reused."""

    group: LaunchGroup
    words: NDArray[np.int32]
    """Result words of the rows, [n, 2 + 2N]."""
    counts: list[int]
    """Number of accepted nodes of each row, including the root, [n]. This is the first result
    word."""
    features: NDArray[np.generic] | None
    """Features, at least [n * N, H]. Each row has N entries, and those of its accepted nodes come
    first. None if there are no features."""
    draft_nodes: int
    """Number of in-process draft nodes that the launch verified in each row."""
    logprobs: dict[int, PathLogprobs]
    """Log-probabilities of the tokens of rows whose sessions request them, indexed by row."""
    is_in_shm: bool = False
    """Whether the features are in shared memory that the drafter of the rows reads."""

    @property
    def nodes(self) -> int:
        """Number of nodes of a row, including the root."""
        return int(self.words.shape[1]) // 2 - 1

    def tokens(self) -> NDArray[np.int32]:
        """Return the tokens that all rows emitted, one row after the other."""
        nodes = self.nodes
        if len(self.counts) == 1:
            return self.words[0, 2 + nodes : 2 + nodes + self.counts[0]].copy()
        standing = np.arange(nodes) < self.words[:, :1]
        return self.words[:, 2 + nodes :][standing]

    def row_features(self) -> list[NDArray[np.generic] | None]:
        """Return the features of the accepted positions of each row, [n]; None for a row whose
        session keeps no features."""
        rows, nodes = self.features, self.nodes
        if rows is None:
            return [None] * len(self.counts)
        return [
            rows[first : first + count] if row.session.keeps_features else None
            for first, count, row in zip(
                range(0, nodes * len(self.counts), nodes),
                self.counts,
                self.group.rows,
                strict=True,
            )
        ]

    def shm_features(self) -> ShmFeatures | None:
        """Return the features in shared memory; None if they are not in memory that the drafter
        reads."""
        link_id = self.group.shm_link_id
        if self.features is None or link_id is None or not self.is_in_shm:
            return None
        keeps = np.array([row.session.keeps_features for row in self.group.rows])
        offsets = np.arange(0, self.nodes * len(keeps), self.nodes)
        counts = np.where(keeps, self.words[:, 0], 0).astype(np.int64)
        return ShmFeatures(link_id, self.features, offsets, counts)

    def in_process_nodes(self) -> list[int]:
        """Return the number of in-process draft nodes that each row verified, [n]."""
        if self.nodes == 1:
            return [0] * len(self.counts)
        verified = [self.draft_nodes] * len(self.counts)
        for number, cut in self.group.draft_limits.items():
            verified[number] = cut
        for number in self.group.undrafted_rows:
            verified[number] = 0
        for number in np.flatnonzero(self.words[:, 1] & UNDRAFTED).tolist():
            verified[number] = 0
        return verified

    def special_rows(self) -> set[int]:
        """Return the indices of the rows that have flags or log-probabilities to report."""
        told = self.words[:, 1] & (TARGET_ONLY_FALLBACK | INVALID_OUTPUT)
        return {*np.flatnonzero(told).tolist(), *self.logprobs}

    def invalid(self) -> NDArray[np.bool_] | None:
        """Return a mask [n] of the rows for which the model returned invalid logits, or None if
        there are none."""
        invalid: NDArray[np.bool_] = (self.words[:, 1] & INVALID_OUTPUT) != 0
        return invalid if invalid.any() else None

    def row_outputs(self, numbers: Sequence[int], *, with_features: bool = True) -> list[RowOutput]:
        """Return the full results of the rows with the indices `numbers`. Their features are None
        if `with_features` is False."""
        told, first, drafted = self.logprobs.get, 2 + self.nodes, self.in_process_nodes()
        features = self.row_features() if with_features else [None] * len(self.counts)
        return [
            RowOutput(
                tuple(words[first : first + words[0]]),
                features[number],
                drafted[number],
                told(number),
                words[1] & TARGET_ONLY_FALLBACK != 0,
                words[1] & INVALID_OUTPUT != 0,
            )
            for number, words in zip(numbers, self.words[list(numbers)].tolist(), strict=True)
        ]

    def block(self) -> NDArray[np.generic] | None:
        """Return the features of all rows as one array [n, H] if each row has only its root, so
        that it emits one token. Otherwise, or if there are no features, return None."""
        rows = self.features
        if rows is None or self.nodes > 1:
            return None
        return rows[: len(self.counts)]


class LaunchLogprobs(NamedTuple):
    """Log-probabilities that sessions requested of a launch. `rows` is indexed by decoding row, and
    `chunks` by prefill chunk."""

    rows: dict[int, PathLogprobs]
    chunks: dict[int, PathLogprobs]


def read_logprobs(launched: LaunchedRound) -> LaunchLogprobs:
    """Wait for a launch, and return the log-probabilities that its sessions requested."""
    if launched.logprobs is None:
        return _NOTHING_TOLD
    asked = launched.logprobs.asked
    words, _ = launched.read_outcome()
    paths = launched.logprobs.read_logprobs([int(words[row, 0]) for row in asked.rows])
    rows = dict(zip(asked.rows, paths, strict=False))
    return LaunchLogprobs(rows, dict(zip(asked.chunks, paths[len(asked.rows) :], strict=True)))


_NOTHING_TOLD: Final = LaunchLogprobs({}, {})


def merge_results(judged: Sequence[LaunchResults], rows: int) -> DecodeOutput:
    """Merge the results of a round's launches. Return the results of all `rows` rows of the round
    in the order in which they were submitted."""
    if len(judged) == 1 and judged[0].group.round_indices == list(range(rows)):
        (all_rows,) = judged
        block = all_rows.block()
        return DecodeOutput(
            counts=all_rows.words[:, 0].astype(np.int64),
            tokens=all_rows.tokens(),
            features=all_rows.row_features,
            row_outputs=partial(all_rows.row_outputs, with_features=block is None),
            draft_nodes=all_rows.in_process_nodes,
            special_rows=all_rows.special_rows,
            shm_features=all_rows.shm_features(),
            invalid=all_rows.invalid(),
            block=block,
        )
    return DecodeOutput.of_rows(_in_order(judged, rows))


def _in_order(judged: Sequence[LaunchResults], rows: int) -> list[RowOutput]:
    """Return the rows of several launches in the order of the round."""
    outcomes = {
        place: outcome
        for each in judged
        for place, outcome in zip(
            each.group.round_indices, each.row_outputs(range(len(each.counts))), strict=True
        )
    }
    return [outcomes[place] for place in range(rows)]
