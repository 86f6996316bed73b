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
bank. Decode rows and prefill chunks have the same arrays: slots int32 [capacity], -1: no row;
counts int32 [capacity]: tokens; starts int32 [capacity]: position of the first one; digests int64
[capacity]: of the prefix that ends with the last one; tokens int32 [capacity, W]; features
[capacity, W, H]. outcomes, int32 [capacity], is of the decode rows alone: which of the drafter's
outcomes came true, so that the next round verifies its draft; negative: none."""
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
"""Arrays of a draft buffer: number int32; digests int64 [X]: of the prefixes that drafts continue;
tokens int32 [X, K], negative: no further node; sizes int32 [X, K]: entries of the distribution that
a token was drawn from; entry_ids and entry_counts int32 [X, K, E]; drafting_ns int64 [1]:
nanoseconds that the drafter's kernels took for the last drafts, for measurement alone. Of F
outcomes of the next round: ahead_number int32 [1]: number of the round behind which they were
drafted; ahead_digests int64 [X, F]: of the prefixes that they make; ahead_tokens int32 [X, F,
K]."""
DECODE_ROWS: Final = VERDICT_FIELDS.index("slots")
"""Index of the first field of the decode rows."""
CHUNK_ROWS: Final = VERDICT_FIELDS.index("chunk_slots")
"""Index of the first field of the prefill chunks."""


@dataclass(slots=True, eq=False)
class ExchangeBuffer:
    """A buffer that kernels of this process's device read or write; static, whoever has joined."""

    addresses: Tensor
    """int64 [fields]: where the number is, and where the arrays of the first bank begin."""
    depth: int
    """Banks; that of round n is n % depth."""
    bank_bytes: int
    """Distance of two banks."""
    views: list[tuple[Tensor, ...]] = field(default_factory=list)
    """On a CPU: the number and the arrays of each bank as tensors, in their order."""

    def bank(self, number: int) -> tuple[Tensor, ...]:
        """On a CPU: the arrays of a round."""
        return self.views[number % self.depth]


class ExchangeState(NamedTuple):
    """Progress of one side of a pair, in private memory of its device."""

    words: Tensor
    """int32 [4]: number of the last round that this side has put (verifier) or taken (drafter);
    1 while the exchange is open; polls of the last wait; 1 if the last wait found what it waited
    for."""
    stamps: Tensor
    """int64 [8]: nanoseconds of the device's clock, at the places `STAMPS`."""
    control: Tensor
    """int64 [2]: addresses of `host_control` and `history`."""
    host_control: Tensor
    """int32 [4] in memory of the host. It writes two words at any time: not 0 ends a wait;
    microseconds that a wait lasts at most. The device writes two: 1 while the exchange is open; 1
    if the last wait found what it waited for."""
    history: Tensor
    """int64 [ROUNDS_KEPT, 10] in memory of the host: what the device says of its last rounds, that
    of number n in row n % ROUNDS_KEPT, at the places `ROUND_TIMES`."""


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
"""Places of `ExchangeState.stamps`: begin and end of the last wait; when this side last published a
number; the end of the last take; on the verifier the end of the last acceptance, on the drafter the
end of the last draft; on the verifier how long the drafter's kernels took for the drafts that were
taken last, in nanoseconds, or 0 where nobody waited for them; and how many sessions of the round
had drafts of an outcome."""
ROUND_TIMES: Final = (*STAMPS, "rows", "number")
"""Places of a row of `ExchangeState.history`: the stamps; decode rows of the round, padding
included, or -1 if it has prefill chunks; its number, which is written last."""
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
