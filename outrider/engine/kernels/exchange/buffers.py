"""Exchange buffers as kernels take them: addresses in device memory, looked up at each launch.

A pair of processes has two buffers. The *verdict buffer* lies in the drafter's memory, and only the
verifier writes it: accepted tokens and features of a round, then its number. It is a ring of banks,
one a round. The *draft buffer* lies in the verifier's memory, and only the drafter writes it:
drafts by the verifier's session slot, then the number of the round that they follow.

Addresses are read from device memory, so that a graph that was captured before a peer joined works
with whichever peer has joined since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

VERDICT_FIELDS: Final = (
    "number",
    "slots",
    "counts",
    "starts",
    "digests",
    "tokens",
    "features",
    "chunk_slots",
    "chunk_counts",
    "chunk_starts",
    "chunk_digests",
    "chunk_tokens",
    "chunk_features",
    "outcomes",
)
"""Arrays of a verdict buffer, in the order of their addresses. `number`, int32, is not part of a
bank. Decode rows and prefill chunks have the same arrays: slots int32 [capacity], -1 if there is no
row; counts int32 [capacity], the number of tokens; starts int32 [capacity], the position of the
first token; digests int64 [capacity], the digest of the prefix that ends with the last token;
tokens int32 [capacity, W]; features [capacity, W, H]. Only decode rows have outcomes, int32
[capacity]: the index of the drafter's outcome that came true, so that the next round verifies its
draft, or a negative number if there is none."""
DRAFT_FIELDS: Final = (
    "number",
    "digests",
    "tokens",
    "sizes",
    "entry_ids",
    "entry_counts",
    "drafting_ns",
    "ahead_number",
    "ahead_digests",
    "ahead_tokens",
)
"""Arrays of a draft buffer: number int32; digests int64 [X], the digest of the prefix that each
draft continues; tokens int32 [X, K], negative after the end of a chain; sizes int32 [X, K], the
number of entries of the distribution that each token was drawn from; entry_ids and entry_counts
int32 [X, K, E]; drafting_ns int64 [1], the nanoseconds that the drafter's kernels took for the last
drafts, for measurement only. For F outcomes of the next round: ahead_number int32 [1], the number
of the round after which they were drafted; ahead_digests int64 [X, F], the digest of the prefix
that ends with each outcome; ahead_tokens int32 [X, F, K]."""
DECODE_ROWS: Final = VERDICT_FIELDS.index("slots")
"""Index of the first field of the decode rows."""
CHUNK_ROWS: Final = VERDICT_FIELDS.index("chunk_slots")
"""Index of the first field of the prefill chunks."""


@dataclass(slots=True, eq=False)
class ExchangeBuffer:
    """A buffer that kernels of this process's device read or write. Its tensors stay the same
    whichever peer has joined."""

    addresses: Tensor
    """int64 [fields]: address of the round number, then the addresses of the arrays in the first
    bank."""
    depth: int
    """Number of banks; round n uses bank n % depth."""
    bank_bytes: int
    """Distance between two consecutive banks, in bytes."""
    views: list[tuple[Tensor, ...]] = field(default_factory=list)
    """On a CPU: for each bank, the round number and the bank's arrays as tensors, in order."""

    def bank(self, number: int) -> tuple[Tensor, ...]:
        """Return the tensors of the bank of round `number`. A bank is the part of the buffer for
        one round. Only buffers in CPU memory have tensors, which the PyTorch references use."""
        return self.views[number % self.depth]


class ExchangeState(NamedTuple):
    """Progress of one side of an exchange, in private memory of its device."""

    words: Tensor
    """int32 [4]: number of the last round that this side has written (verifier) or taken (drafter);
    1 while the exchange is open; number of polls of the last wait; 1 if the last wait found what it
    waited for."""
    stamps: Tensor
    """int64 [8]: nanoseconds of the device's clock, in the order of `STAMPS`."""
    control: Tensor
    """int64 [2]: addresses of `host_control` and `history`."""
    host_control: Tensor
    """int32 [4] in host memory. The host may write two words at any time: the first ends a wait if
    it is not 0, and the second is the maximum duration of a wait in microseconds. The device writes
    the other two: 1 while the exchange is open, and 1 if the last wait found what it waited for."""
    history: Tensor
    """int64 [ROUNDS_KEPT, 10] in host memory: what the device has recorded of its last rounds, in
    the order of `ROUND_TIMES`. Round n is in row n % ROUNDS_KEPT."""


STAMPS: Final = (
    "wait_begin",
    "wait_end",
    "published",
    "taken",
    "accepted",
    "drafting_ns",
    "hits",
    "unused",
)
"""Fields of `ExchangeState.stamps`, in order: begin and end of the last wait; time at which this
side last published a number; end of the last take; end of the last acceptance (verifier) or of the
last draft (drafter); on the verifier, nanoseconds that the drafter's kernels took for the drafts
that were taken last, or 0 if no session waited for them; number of sessions of the round that had a
draft of their outcome."""
ROUND_TIMES: Final = (*STAMPS, "rows", "number")
"""Fields of a row of `ExchangeState.history`, in order: the stamps; the number of decode rows of
the round, including padding, or -1 if it has prefill chunks; the round's number, which is written
last."""
ROUNDS_KEPT: Final = 256


def new_state(device: torch.device) -> ExchangeState:
    """Return the state of a side that is not open yet."""
    with torch.inference_mode(False):
        pinned = device.type == "cuda"
        host = torch.zeros(4, dtype=torch.int32, pin_memory=pinned)
        history = torch.zeros((ROUNDS_KEPT, len(ROUND_TIMES)), dtype=torch.int64, pin_memory=pinned)
        return ExchangeState(
            torch.zeros(4, dtype=torch.int32, device=device),
            torch.zeros(8, dtype=torch.int64, device=device),
            torch.tensor([host.data_ptr(), history.data_ptr()], dtype=torch.int64, device=device),
            host,
            history,
        )
