"""Messages about a replica: the draft model of one verifier on another GPU of the verifier's host.

The verifier manages the replica's session slots and KV blocks by these messages. The rounds
themselves go through memory that both processes share; its file descriptors are passed beside the
messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.spec.sampling import SamplingParams
from outrider.wire.arrays import TensorDtype


class MemoryKind(StrEnum):
    """Memory that a pair's exchange buffers are in."""

    DEVICE = "device"
    """Memory of a device, which the other device maps."""
    HOST = "host"
    """Pinned memory of the host, which both devices map."""


# ---- verifier -> drafter -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOffer:
    """Sizes of the replica that a verifier asks a drafter for; the drafter answers with either
    ReplicaReady or ReplicaRefused."""

    num_slots: int
    """Session slots of the verifier, its padding slot included."""
    max_rows: int
    """Decode rows of a round, at most."""
    draft_length: int
    """Tokens of a draft chain, at most."""
    max_chunks: int
    """Prefill chunks of a round, at most."""
    chunk_tokens: int
    """Tokens of a prefill chunk, at most."""
    feature_size: int
    """Values of a feature."""
    feature_dtype: TensorDtype
    """Element type of the features, a floating-point one."""
    distribution_entries: int
    """Entries of a draft distribution; 0: drafts come without distributions."""
    depth: int
    """Rounds that the verifier may be ahead of the drafter."""
    num_blocks: int
    """KV blocks of the verifier's pool."""
    block_tokens: int
    """KV slots of a block."""
    table_blocks: int
    """Blocks of a session's block table, at most."""
    vocab_size: int
    """Size of the verifier's vocabulary."""
    memory: MemoryKind
    """Memory that the verifier wants the exchange buffers in."""
    fan_out: int = 0
    """Outcomes of a round that are drafted for while it runs, a session; 0: none."""
    ahead_rows: int = 0
    """Decode rows of a round whose outcomes are drafted for, at most."""
    gpu: str = ""
    """UUID of the verifier's GPU; empty on a CPU. A drafter on the same one refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSessionBegin:
    """A session begins in a slot of the replica, or comes back to one."""

    slot: int
    blocks: tuple[int, ...]
    """The session's KV blocks, in order; packed as int32 on the wire."""
    sampling: SamplingParams
    """With a draft key in place of the seed."""
    num_rows: int
    """Draft rows whose KV is in these blocks already."""
    prompt_ids: tuple[int, ...] = ()
    """Ids that its prompt has, each once; only where penalties look at tokens. Packed as int32 on
    the wire."""
    output_ids: tuple[int, ...] = ()
    """Tokens that it has emitted, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBlocksAdded:
    """A session of the replica got more KV blocks."""

    slot: int
    first: int
    """Index of the first of them in the session's block table."""
    blocks: tuple[int, ...]
    """The blocks, in order; packed as int32 on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSessionEnd:
    """No session is in a slot of the replica any more."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRoundLaunched:
    """The verifier has launched a round, which comes by the exchange buffers."""

    rows: int
    """Rows to draft behind, padding of the bucket included; 0: none."""
    chunks: int
    """Prefill chunks, padding of the bucket included; 0: none."""
    is_sampled: bool
    """Whether any session processes its draft logits or draws its drafts."""
    is_ahead: bool = False
    """Whether outcomes of the next round are drafted for while it runs."""
    has_rejection: bool = False
    """Whether any session has the rejection rule, so that its drafts come with distributions; only
    in a round that `is_sampled`."""


ReplicaCommand = (
    ReplicaOffer
    | ReplicaSessionBegin
    | ReplicaBlocksAdded
    | ReplicaSessionEnd
    | ReplicaRoundLaunched
)

# ---- drafter -> verifier -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReady:
    """The drafter has a replica as it was offered."""

    memory: MemoryKind
    """Memory that the exchange buffers are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRefused:
    """The drafter cannot have a replica as it was offered."""

    reason: str
    """Why, for logs; not empty."""


ReplicaAnswer = ReplicaReady | ReplicaRefused
