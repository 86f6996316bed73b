"""Exchange buffers: memory of one process into which the other process writes.

A drafter and a verifier share two buffers. The *verdict buffer* lies in the drafter's memory, and
only the verifier writes it: the accepted tokens and features of a round, then the number of the
round. It is a ring of banks, one bank per round. The *draft buffer* lies in the verifier's memory,
and only the drafter writes it: drafts, indexed by the verifier's session slot, then the number of
the round that they follow.

Kernels read the addresses of a buffer from device memory at each launch. A CUDA graph that was
captured before a peer connected therefore works with any peer that connects later.
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
"""Names of the arrays of a verdict buffer, in the order of their addresses.

`number`, int32, is the round number; it is not part of a bank. Decode rows and prefill chunks have
the same arrays:

* slots, int32 [capacity]: the verifier's session slot; -1 if there is no row
* counts, int32 [capacity]: the number of tokens
* starts, int32 [capacity]: the position of the first token
* digests, int64 [capacity]: the digest of the prefix that ends with the last token
* tokens, int32 [capacity, W]
* features, [capacity, W, H]

Only decode rows have outcomes, int32 [capacity]: the index of that outcome, among those for which
the drafter drafted, with which the round ended. The next round verifies its draft. The index is
negative if there is none."""
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
"""Names of the arrays of a draft buffer, in the order of their addresses.

For X session slots of the verifier, K tokens of a chain and E entries of a distribution:

* number, int32: the number of the round that the drafts follow
* digests, int64 [X]: the digest of the prefix that each draft continues
* tokens, int32 [X, K]: negative after the end of a chain
* sizes, int32 [X, K]: the number of entries of the distribution from which each token was drawn
* entry_ids and entry_counts, int32 [X, K, E]: the entries of these distributions
* drafting_ns, int64 [1]: the time that the drafter's kernels took for the last drafts, in
  nanoseconds, for measurement only

For look-ahead drafts, with F possible outcomes of the next round for each slot:

* ahead_number, int32 [1]: the number of the round after which they were drafted
* ahead_digests, int64 [X, F]: the digest of the prefix that ends with each outcome
* ahead_tokens, int32 [X, F, K]"""
DECODE_ROWS: Final = VERDICT_FIELDS.index("slots")
"""Index in VERDICT_FIELDS of the first array of decode rows."""
CHUNK_ROWS: Final = VERDICT_FIELDS.index("chunk_slots")
"""Index in VERDICT_FIELDS of the first array of prefill chunks."""


@dataclass(slots=True, eq=False)
class ExchangeBuffer:
    """A verdict or draft buffer that kernels of this process read or write. The tensors of this
    object stay the same when another peer connects; only their content changes."""

    addresses: Tensor
    """int64 [num_fields]: address of the round number, then the address of each array in the first
    bank, in the order of VERDICT_FIELDS or DRAFT_FIELDS."""
    depth: int
    """Number of banks; round n uses bank n % depth."""
    bank_bytes: int
    """Distance between two consecutive banks, in bytes."""
    views: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Only if the buffer is in CPU memory: for each bank, a tuple of tensors: the round number,
    then the arrays of the bank."""

    def bank(self, number: int) -> tuple[Tensor, ...]:
        """Return the tensors of the bank that round `number` uses. Only buffers in CPU memory have
        such tensors, for the PyTorch references."""
        return self.views[number % self.depth]


class ExchangeState(NamedTuple):
    """Progress of one side of an exchange, in private memory of its device."""

    words: Tensor
    """int32 [4]: words[0] is the number of the last round that this side has published (verifier)
    or received (drafter); words[1] is 1 while the exchange is open; words[2] is the number of polls
    of the last wait; words[3] is 1 if the last wait succeeded, 0 if it ended early."""
    stamps: Tensor
    """int64 [8]: measurements of the last round, see `STAMPS`."""
    control: Tensor
    """int64 [2]: addresses of `host_control` and `history`."""
    host_control: Tensor
    """int32 [4] in host memory. The host writes the first two words at any time: [0] cancels a wait
    if it is not 0, and [1] is the maximum duration of a wait in microseconds. The device writes the
    others: [2] is 1 while the exchange is open, and [3] is 1 if the last wait succeeded."""
    history: Tensor
    """int64 [ROUNDS_KEPT, 10] in host memory: measurements of the last rounds. Round n is in row n
    % ROUNDS_KEPT, whose columns are `ROUND_TIMES`."""


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
"""Entries of `ExchangeState.stamps`. Times are in nanoseconds of the device's clock.

* wait_begin, wait_end: begin and end of the last wait
* published: time at which this side last published a round number
* taken: time at which this side last finished copying data from its buffer
* accepted: end of the last acceptance (verifier) or of the last draft (drafter)
* drafting_ns: on the verifier, the duration of the drafter's kernels for the last drafts; 0 if no
  session waited for them
* hits: number of sessions of the round that had a look-ahead draft for their outcome
* unused: not set"""
ROUND_TIMES: Final = (*STAMPS, "rows", "number")
"""Columns of `ExchangeState.history`: the entries of STAMPS, then `rows` (the number of decode rows
of the round, including padding, or -1 if it has prefill chunks), then `number` (the round number,
which is written last)."""
ROUNDS_KEPT: Final = 256


def new_state(device: torch.device) -> ExchangeState:
    """Return the state of one side of an exchange that is not open yet."""
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
