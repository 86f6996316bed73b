"""Paged KV cache of the draft model: slots, blocks and sampling state of followed sessions.

Letters in shapes: X device slots, the last one for padding; T blocks of a table; L layers; G
key/value heads; S pool slots; d head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.block_allocator import BlockAllocator
from outrider.engine.device.drafting.draft_forward import DraftVocabulary
from outrider.engine.device.slots.free_slots import FreeSlots
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_NUMBERS,
    SamplingState,
    stream_key_row,
)
from outrider.errors import ResourceExhaustedError
from outrider.spec.sampling import SamplingParams

BLOCK_TOKENS = 16
_FIRST_CAPACITY = 256


class KVShape(NamedTuple):
    """Shape of the keys and values of one KV row, which is one position of a session."""

    num_layers: int
    """L, number of layers of the draft model."""
    num_kv_heads: int
    """G, number of key/value heads of a layer."""
    head_dim: int
    """d, width of a head."""


class PagedDraftKV:
    """Paged KV cache of the draft model for many sessions. Unused entries of block tables contain
    the padding block."""

    def __init__(
        self,
        kv: KVShape,
        *,
        max_rows: int,
        max_session_rows: int,
        max_sessions: int,
        scratch_blocks: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        vocabulary: DraftVocabulary,
    ) -> None:
        """Allocate the cache. `max_rows`: maximum number of KV rows of all sessions together.
        `max_session_rows`: maximum number of KV rows of one session. `scratch_blocks`: number of
        additional blocks, which belong to no session."""
        blocks = max(max_rows // BLOCK_TOKENS, 1)
        table = min(-(-max_session_rows // BLOCK_TOKENS), blocks)
        self._allocator = BlockAllocator(blocks)
        self._free = FreeSlots(max_sessions, reason="DRAFT_SLOTS_EXHAUSTED")
        self.padding, count = self._free.padding, self._free.total
        self._held: dict[int, list[int]] = {}
        self.scratch = range(blocks + 1, blocks + 1 + scratch_blocks)
        """Blocks that belong to no session; the block before them is the padding block."""
        slots = self.scratch.stop * BLOCK_TOKENS
        shape = (2, kv.num_layers, kv.num_kv_heads, slots, kv.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        """[2, L, G, S, d]: keys and values."""
        self.tables = torch.full((count, table), blocks, dtype=torch.int32, device=device)
        """int32 [X, T]: KV blocks of each session."""
        self.sampling = SamplingState(
            stream_keys=torch.zeros((count, NUM_STREAMS), dtype=torch.int64, device=device),
            temperatures=torch.zeros(count, dtype=torch.float32, device=device),
            rules=torch.zeros(count, dtype=torch.int32, device=device),
        )

        self.warp = LogitsSlots(
            count, len(vocabulary.target_ids), device, draft_columns=vocabulary.draft_columns
        )
        """State of the logits processing of each session."""

    @property
    def capacity(self) -> int:
        """Maximum number of KV rows of a session."""
        return self.tables.shape[1] * BLOCK_TOKENS

    @property
    def used_rows(self) -> int:
        """Number of reserved KV rows."""
        return (self._allocator.total - self._allocator.free) * BLOCK_TOKENS

    def open_slot(self, sampling: SamplingParams) -> int:
        """Assign a device slot to a new session and return it. The session's sampling state is
        written to the slot. Raises ResourceExhaustedError if all slots are taken."""
        slot = self._free.take_slot()
        self._held[slot] = []
        state = self.sampling
        # A copy from pageable memory is complete when it returns, so nothing must be kept alive.
        state.stream_keys[slot].copy_(torch.from_numpy(stream_key_row(sampling)))
        state.temperatures[slot] = sampling.temperature
        state.rules[slot] = RULE_NUMBERS[sampling.effective_rule]
        self.warp.begin_session(slot, sampling)
        return slot

    def num_reserved(self, slot: int) -> int:
        """Return the number of KV rows that are reserved for a session."""
        return len(self._held[slot]) * BLOCK_TOKENS

    def reserve(self, slot: int, rows: int, *, ceiling: int) -> None:
        """Ensure that a session has KV blocks for at least `rows` rows in total. A reservation that
        must grow is doubled if `ceiling` rows and the free blocks allow it.

        Raises ResourceExhaustedError if too few blocks are free or the session's table is too
        small.
        """
        held = self._held[slot]
        have = len(held)
        needed = -(-rows // BLOCK_TOKENS)
        if needed <= have:
            return
        if needed > self.tables.shape[1]:
            raise ResourceExhaustedError(
                f"a session may hold {self.capacity} draft KV rows, not {rows}",
                reason="DRAFT_CONTEXT_TOO_LONG",
            )
        wished = min(max(2 * have * BLOCK_TOKENS, _FIRST_CAPACITY), ceiling) // BLOCK_TOKENS
        wished = min(max(wished, needed), self.tables.shape[1])
        spare = max(needed, have + self._allocator.free)
        fresh = self._allocator.allocate_blocks(min(wished, spare) - have)
        held += fresh
        table = torch.tensor(fresh, dtype=torch.int32)
        self.tables[slot, have : len(held)].copy_(table)

    def close_slot(self, slot: int) -> None:
        """Free a session's slot and blocks."""
        held = self._held.pop(slot)
        if held:
            self._allocator.free_blocks(held)
            self.tables[slot, : len(held)] = self._allocator.total
        self._free.return_slot(slot)

    def copy_kv(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values [L, G, rows, d] of a session's first rows."""
        index = torch.arange(rows, device=self.tables.device)
        blocks = self.tables[slot, index // BLOCK_TOKENS].long()
        pool = blocks * BLOCK_TOKENS + index % BLOCK_TOKENS
        return self.storage[0, :, :, pool], self.storage[1, :, :, pool]
