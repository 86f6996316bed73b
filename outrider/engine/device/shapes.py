"""Which bucket a round runs in: a graph is captured for each, so they are few (pure)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROW_BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sessions of a round; unused rows work for the padding slot."""
NODE_BUCKETS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 33, 48, 64, 65, 97, 129)
"""Nodes of a row, the root included; unused ones are absent nodes."""


class Drafts(StrEnum):
    """Where the drafts of a round come from."""

    NONE = "none"
    CHAIN = "chain"
    """The host, without branches."""
    TREE = "tree"
    """The host, with branches."""
    OWN = "own"
    """The head in this process; they never leave the device."""


class Judge(StrEnum):
    """How much of the acceptance runs on the device."""

    MATCH = "match"
    """Greedy and coupled rows whose logits are not warped: a comparison of tokens."""
    SAMPLED = "sampled"
    """Any rule and any warper."""
    HOST = "host"
    """None: the host reads the logits (shipped draft laws)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """A bucket: the key of a graph."""

    rows: int
    """B."""
    nodes: int
    """N, the root included."""
    drafts: Drafts
    judge: Judge
    features: bool
    """Whether projected features are computed."""


def bucket(value: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `value`; beyond the largest one, `value` itself."""
    place = bisect_left(sizes, value)
    return sizes[place] if place < len(sizes) else value


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """The row buckets that rounds of up to `max_rows` sessions run in."""
    smaller = [size for size in ROW_BUCKETS if size < max_rows]
    return (*smaller, bucket(max_rows, ROW_BUCKETS))
