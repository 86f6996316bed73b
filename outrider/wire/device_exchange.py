"""Messages about a replica: a drafter's copy of a verifier's session slots and block tables.

A replica is on another GPU of the verifier's host. The verifier manages its session slots and KV
blocks by these messages. The data of the rounds pass through memory that both processes share. File
descriptors of this memory are passed separately from the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.spec.sampling import SamplingParams
from outrider.wire.arrays import TensorDtype


class MemoryKind(StrEnum):
    """Memory that contains the exchange buffers of a verifier and a drafter."""

    DEVICE = "device"
    """Memory of one device, which the other device maps."""
    HOST = "host"
    """Pinned memory of the host, which both devices map."""


# ---- verifier -> drafter -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOffer:
    """Request of a verifier to create a replica of these sizes. The drafter answers with either
    ReplicaReady or ReplicaRefused.
    """

    num_slots: int
    """Number of session slots of the verifier, including the slot that padding rows use."""
    max_rows: int
    """Largest number of rows to draft for in a round, one row for each session."""
    draft_length: int
    """Largest number of tokens in a draft chain."""
    max_chunks: int
    """Largest number of prefill chunks in a round."""
    chunk_tokens: int
    """Largest number of tokens in a prefill chunk."""
    feature_size: int
    """Number of values in the feature vector of a token."""
    feature_dtype: TensorDtype
    """Element type of the features, a floating-point one."""
    distribution_entries: int
    """Largest number of entries in a draft distribution; 0 if drafts have no distributions."""
    depth: int
    """Number of rounds by which the verifier may be ahead of the drafter."""
    num_blocks: int
    """Number of KV blocks in the verifier's pool."""
    block_tokens: int
    """Number of KV slots (tokens) in a block."""
    table_blocks: int
    """Largest number of blocks in a session's block table."""
    vocab_size: int
    """Size of the verifier's vocabulary."""
    memory: MemoryKind
    """Memory that the verifier wants the exchange buffers in."""
    fan_out: int = 0
    """Number of likely outcomes of a session's round for which drafts are made while the round
    runs; 0 disables look-ahead.
    """
    ahead_rows: int = 0
    """Largest number of decode rows in a round with look-ahead. Larger rounds have no look-ahead.
    """
    gpu: str = ""
    """UUID of the verifier's GPU; empty on a CPU. A drafter on the same GPU refuses the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSessionBegin:
    """Message that a session begins, or resumes, in a slot of the replica."""

    slot: int
    blocks: tuple[int, ...]
    """Ids of the session's KV blocks, in order; packed as int32 on the wire."""
    sampling: SamplingParams
    """Sampling parameters, with a draft key in place of the seed."""
    num_rows: int
    """Number of rows (one for each token) whose draft-model KV is already in these blocks."""
    prompt_ids: tuple[int, ...] = ()
    """Distinct token ids of the prompt; empty unless penalties need them. Packed as int32 on the
    wire.
    """
    output_ids: tuple[int, ...] = ()
    """Token ids that the session has emitted; empty unless penalties need them. Packed as int32 on
    the wire.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBlocksAdded:
    """Message that a session of the replica has got more KV blocks."""

    slot: int
    first: int
    """Index of the first new block in the session's block table."""
    blocks: tuple[int, ...]
    """Ids of the new blocks, in order; packed as int32 on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSessionEnd:
    """Message that the session in a slot of the replica has ended."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRoundLaunched:
    """Message that the verifier has launched a round. The data of the round pass through the
    exchange buffers.
    """

    rows: int
    """Number of rows to draft for, including padding; 0 if there are none."""
    chunks: int
    """Number of prefill chunks, including padding; 0 if there are none."""
    is_sampled: bool
    """Whether any session applies logits processors to its draft logits or samples its drafts."""
    is_ahead: bool = False
    """Whether the drafter makes drafts for likely outcomes of the next round while that round runs.
    """
    has_rejection: bool = False
    """Whether any session uses the rejection rule, so that its drafts need distributions. Only true
    if `is_sampled` is true.
    """


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
    """Answer that the drafter has created the replica of a ReplicaOffer."""

    memory: MemoryKind
    """Memory that the exchange buffers are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRefused:
    """Answer that the drafter cannot create the replica of a ReplicaOffer."""

    reason: str
    """Reason for the refusal, for the log; not empty."""


ReplicaAnswer = ReplicaReady | ReplicaRefused
