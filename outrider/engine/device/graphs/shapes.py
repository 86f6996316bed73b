"""Batch shapes (buckets) of rounds, which are the keys of their CUDA graphs.

Every bucket has a captured graph, so there are few buckets. The rows of a round are decoding
sessions, with N nodes each, and prefill chunks. A prefill chunk has up to CHUNK_TOKENS consecutive
prompt tokens of one session; a session may have several chunks in one round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROW_BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of decoding sessions of a round. Unused rows run with the padding slot."""
CHAIN_BUCKETS: Final = (2, 3, 4, 5, 6, 8)
"""Numbers of nodes of a row with a chain, including the root. Unused nodes have token -1, and a
longer chain runs as a tree."""
TREE_BUCKETS: Final = (8, 17, 33, 64, 65, 129)
"""Numbers of nodes of a row with a tree, the root included."""
CHUNK_TOKENS: Final = 32
"""Number of prompt tokens of a prefill chunk. It is small, because the unused token rows of a chunk
that is not full take time, too, and delay the decoding sessions of the round."""
CHUNK_BUCKETS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Numbers of prefill chunks of a round without decoding sessions; unused chunks are padding. A
verifier captures only the sizes that its token budget needs (`ShapeFamily`)."""
MAX_CHUNKS: Final = CHUNK_BUCKETS[-1]
"""Maximum number of prefill chunks of a round."""
MIXED_ROW_BUCKETS: Final = (4, 8, 16, 32, 64, 128, 256)
"""Numbers of decoding sessions of a round with prefill chunks. There are few sizes, because each is
captured with every size of MIXED_CHUNK_BUCKETS."""
MIXED_CHAIN_BUCKETS: Final = (4, 5, 6, 8)
"""Numbers of nodes of a row with a chain in a round with prefill chunks. There are few sizes, for
the same reason as in MIXED_ROW_BUCKETS."""
FEW_CHAIN_BUCKETS: Final = (5, 8)
"""Chain buckets of a verifier with an in-process drafter, where few sessions have drafts from the
host. In such a verifier prefill chunks never share a launch with drafts from the host."""
FEW_TREE_BUCKETS: Final = (17, 65, 129)
"""Tree buckets of a verifier with an in-process drafter."""
MIXED_CHUNK_BUCKETS: Final = (1, 2, 3, 5, 8, 16, 24, 32, 40, 48, 64, 96, 128)
"""Numbers of prefill chunks of a round with decoding sessions. A prompt whose beginning is in the
prefix cache needs 1; the other small sizes leave few rows unused for chat prompts of 42 to 243
tokens, and the large ones are for long prompts and bursts."""
MANY_CHUNKS: Final = 16
"""Rounds with decoding sessions and more prefill chunks than this have fewer bucket sizes. The
prompts determine their duration, so some unused rows of decoding sessions hardly add to it."""
MANY_CHUNKS_ROW_BUCKETS: Final = (8, 32, 64, 128, 256)
"""Numbers of decoding sessions of a round with more than MANY_CHUNKS prefill chunks."""
MANY_CHUNKS_CHAIN_BUCKETS: Final = (5, 8)
"""Numbers of nodes of a row with a chain in a round with more than MANY_CHUNKS prefill chunks.
Trees from the host never share such a round: their many unused nodes would cost more than a
separate launch."""
MAX_IN_PROCESS_TREE_ROWS: Final = 16
"""Maximum number of sessions of a round with trees, for an in-process drafter that drafts trees and
chains. With more sessions trees gain less than their rows cost (an 8B model on an H200 at 32
sessions: 8,165 tokens/s with trees of 16 nodes, 11,247 with chains of 4)."""
MIN_SHORT_CHAIN_ROWS: Final = 32
"""Minimum number of sessions of a round with the shorter one of two chain lengths. With many
sessions the last token of a chain may cost more than it gains (an 8B model on an H200 at 64
sessions, temperature 0.8: 14,986 tokens/s with chains of 3, 13,871 with chains of 4)."""
MAX_SHORT_CHAIN_CHUNKS: Final = 3
"""Maximum number of prefill chunks of a round with the shorter one of two chain lengths. With 64
sessions nearly every round has a prompt of 1 to 3 chunks; the limit saves graphs."""
MAX_TOKEN_ROWS: Final = 2048
"""Maximum number of token rows (rows times nodes) of a bucket; a bucket of one row may have
more."""


class DraftKind(StrEnum):
    """Source of the drafts of a round."""

    NONE = "none"
    CHAIN = "chain"
    """Drafts without branches, from the host."""
    TREE = "tree"
    """Drafts with branches, from the host."""
    IN_PROCESS = "own"
    """Drafts of the in-process drafter, which never leave the device."""


class AcceptanceMode(StrEnum):
    """Kind of acceptance that the graph of a round computes."""

    MATCH = "match"
    """Draft tokens are compared with the tokens that the target chooses. This serves greedy and
    coupled sessions that do not use the logits processor."""
    SAMPLED = "sampled"
    """Acceptance for sessions of any rule, with or without the logits processor."""
    REJECTION = "rejection"
    """As SAMPLED, for rounds with sessions of the rejection rule. This mode is used only if drafts
    and their distributions come from another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """Batch shape (bucket) of a round, the key of its CUDA graph."""

    rows: int
    """B, the number of decoding sessions; 0 in a round of prefill chunks alone."""
    nodes: int
    """N, the number of nodes of each row, the root included."""
    draft_kind: DraftKind
    acceptance_mode: AcceptanceMode
    has_features: bool
    """Whether projected features are computed."""
    chunks: int = 0
    """Q, the number of prefill chunks, of P = CHUNK_TOKENS token rows each."""

    @property
    def is_sampled(self) -> bool:
        """Whether sessions may have any acceptance rule and use the logits processor."""
        return self.acceptance_mode is not AcceptanceMode.MATCH

    @property
    def has_distributions(self) -> bool:
        """Whether rows may have draft distributions from the host."""
        return self.is_sampled and self.draft_kind in (DraftKind.CHAIN, DraftKind.TREE)

    @property
    def can_be_undrafted(self) -> bool:
        """Whether in-process drafting may be postponed until the host has read the result of the
        round."""
        return self.draft_kind is DraftKind.IN_PROCESS and self.is_sampled

    @property
    def token_rows(self) -> int:
        """M, the number of token rows of the target's forward."""
        return self.rows * self.nodes + self.chunks * CHUNK_TOKENS

    @property
    def result_words(self) -> int:
        """Number of int32 words of one decoding row in `VerifyOutput.result`."""
        return 2 + 2 * self.nodes


def bucket_for(value: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes` that is at least `value`, or `value` if it is beyond the
    largest size."""
    place = bisect_left(sizes, value)
    return sizes[place] if place < len(sizes) else value


def buckets_up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the bucket sizes that are needed for all values up to `most`."""
    smaller = [size for size in sizes if size < most]
    return (*smaller, bucket_for(most, sizes))
