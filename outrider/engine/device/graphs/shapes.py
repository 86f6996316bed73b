"""Batch shapes (buckets) of rounds, the keys of CUDA graphs. Pure.

Every bucket has a captured graph, so there are few. A round's rows are sessions that decode, N
nodes each, and prefill chunks: up to PREFILL_CHUNK_TOKENS consecutive tokens of one session, which
may have several in one round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROW_BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sessions of a round; unused rows work for the padding slot."""
CHAIN_BUCKETS: Final = (2, 3, 4, 5, 6, 8)
TREE_BUCKETS: Final = (8, 17, 33, 64, 65, 129)
"""Nodes of a row, the root included; unused ones are absent nodes. Chains that are longer than the
last of theirs run as trees."""
CHUNK_TOKENS: Final = 32
"""Prompt tokens of a prefill chunk. Beside many sessions each row counts, those of a prefill
chunk's free end too.
"""
CHUNK_BUCKETS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""Pieces of prompts in a round of nothing else; unused ones are absent."""
MIXED_ROW_BUCKETS: Final = (4, 8, 16, 32, 64, 128, 256)
MIXED_CHAIN_BUCKETS: Final = (4, 5, 6, 8)
"""Sessions that decode in a round with prefill chunks, and nodes of their chains: few, for each is
captured with every size of prefill chunks."""
FEW_CHAIN_BUCKETS: Final = (5, 8)
FEW_TREE_BUCKETS: Final = (17, 65, 129)
"""Nodes of a row with drafts from outside where an in-process drafter drafts for nearly all: few
sizes, and prompts never share their launch."""
MIXED_CHUNK_BUCKETS: Final = (1, 2, 3, 5, 8, 16)
"""Pieces in a round in which sessions decode: six sizes. 1 is what is left of a prompt that begins
like one before it; the others leave few rows unused where chat prompts of 42 to 243 tokens come in
all the time."""
MIN_MIXED_CHUNKS: Final = 2
"""What such a round takes of prompts if there are any, whatever it lasts."""
MAX_MIXED_CHUNKS: Final = MIXED_CHUNK_BUCKETS[-1]
MAX_TOKEN_ROWS: Final = 2048
"""Rows times nodes of a bucket; one row may have more."""


class DraftKind(StrEnum):
    """Source of the drafts of a round."""

    NONE = "none"
    CHAIN = "chain"
    """The host, without branches."""
    TREE = "tree"
    """The host, with branches."""
    IN_PROCESS = "own"
    """The in-process drafter; they never leave the device."""


class AcceptanceMode(StrEnum):
    """Part of the acceptance that runs on the device."""

    MATCH = "match"
    """Greedy and coupled rows whose logits are not processed by the logits processor: a comparison
    of tokens."""
    SAMPLED = "sampled"
    """Any rule and any logits processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """A bucket: the key of a graph."""

    rows: int
    """B; 0 in a round of nothing but prefill chunks."""
    nodes: int
    """N, the root included."""
    draft_kind: DraftKind
    acceptance_mode: AcceptanceMode
    has_features: bool
    """Whether projected features are computed."""
    chunks: int = 0
    """Q prefill chunks, of P = PREFILL_CHUNK_TOKENS rows each."""

    @property
    def has_distributions(self) -> bool:
        """Whether rows may bring draft distributions from outside."""
        return self.acceptance_mode is AcceptanceMode.SAMPLED and self.draft_kind in (
            DraftKind.CHAIN,
            DraftKind.TREE,
        )

    @property
    def can_be_undrafted(self) -> bool:
        """Whether in-process drafts may be left until the host has seen the outcome."""
        return (
            self.draft_kind is DraftKind.IN_PROCESS
            and self.acceptance_mode is AcceptanceMode.SAMPLED
        )

    @property
    def token_rows(self) -> int:
        """M: rows of the target's forward."""
        return self.rows * self.nodes + self.chunks * CHUNK_TOKENS

    @property
    def result_words(self) -> int:
        """int32 words of the outcome of a row that the device judges."""
        return 2 + 2 * self.nodes


def bucket_for(value: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `value`; beyond the largest one, `value` itself."""
    place = bisect_left(sizes, value)
    return sizes[place] if place < len(sizes) else value


def buckets_up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The buckets that everything up to `most` runs in."""
    smaller = [size for size in sizes if size < most]
    return (*smaller, bucket_for(most, sizes))
