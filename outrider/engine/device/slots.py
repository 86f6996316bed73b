"""Session slots: what the device keeps of each session from one round to the next.

X slots, the last one for padding; T blocks of the longest sequence; K own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.free_slots import FreeSlots
from outrider.engine.device.legal_rows import LegalRows
from outrider.engine.device.uploads import upload
from outrider.engine.device.warp_slots import WarpSlots
from outrider.engine.kernels.state import (
    NUM_STREAMS,
    RULE_NUMBERS,
    SamplingState,
    SequenceState,
    stream_keys,
)
from outrider.engine.kvcache import KVPool, KVSequence
from outrider.errors import ResourceExhaustedError
from outrider.spec.sampling import SamplingParams

_KEY_WORDS = 2 * NUM_STREAMS
_FIELDS = _KEY_WORDS + 4
"""Words of a slot beside its table: stream keys, temperature, rule, length, root."""


class SessionSlots:
    """Allocates slots and writes their state, in the order of the stream."""

    def __init__(
        self,
        pool: KVPool,
        *,
        max_sessions: int,
        max_len: int,
        max_nodes: int,
        vocab_size: int,
        device: torch.device,
        own_nodes: int = 0,
    ) -> None:
        """`max_len`: most K/V slots of a session; `max_nodes`: most nodes of a row; `own_nodes`:
        nodes of a row with drafts of this process's own head."""
        pool.name_by_tables()
        self._free = FreeSlots(max_sessions, reason="SESSIONS_EXHAUSTED")
        self.padding = self._free.padding
        count, blocks = self._free.total, pool.blocks_for(max_len)
        # Padding rows write the nodes of a round, and the steps of a draft behind them.
        self._padding_kv = pool.allocate(2 * max_nodes)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.sequence = SequenceState(
            tables=zeros(count, blocks), lengths=zeros(count), roots=zeros(count)
        )
        self.sampling = SamplingState(
            stream_keys=zeros(count, NUM_STREAMS, dtype=torch.int64),
            temperatures=zeros(count, dtype=torch.float32),
            rules=zeros(count),
        )
        self.warp = WarpSlots(count, vocab_size, device)
        """What the sessions do to the target's logits."""
        self.legal = LegalRows(
            max_sessions=max_sessions,
            max_nodes=max_nodes,
            own_nodes=own_nodes,
            vocab_size=vocab_size,
            device=device,
        )
        """What their grammars allow, launch by launch."""
        self._pool, self._device, self._blocks = pool, device, blocks
        self._staged = zeros(_FIELDS + blocks)
        self._write(self.padding, self._padding_kv.blocks, SamplingParams(), length=1, root=0)

    def check_blocks(self, count: int) -> None:
        """Raises ResourceExhaustedError for more K/V blocks than a slot's table holds."""
        if count > self._blocks:
            raise ResourceExhaustedError(
                f"the session needs {count} K/V blocks, a slot's table holds {self._blocks}",
                reason="CONTEXT_TOO_LONG",
            )

    def open(self, kv: KVSequence) -> int:
        """A slot for a session. Raises ResourceExhaustedError when all are taken, or when it has
        more K/V blocks than a slot's table holds."""
        self.check_blocks(kv.num_blocks)
        return self._free.take()

    def close(self, slot: int) -> None:
        """Give a slot back; rounds in flight may still write to it."""
        self._free.give(slot)

    def release(self) -> None:
        """Give the padding slot's blocks back; the slots are of no use afterwards."""
        self._padding_kv.release()
        self._pool.name_by_tables(False)

    def begin(
        self,
        slot: int,
        kv: KVSequence,
        sampling: SamplingParams,
        *,
        length: int = 1,
        root: int = 0,
    ) -> None:
        """The host's word on a slot's session: `length` committed tokens, the last one `root`."""
        self._write(slot, kv.blocks, sampling, length=length, root=root)

    def grow(self, added: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Sessions hold more blocks: of each the slot, how many of them the slot's table has, and
        the others."""
        if not added:
            return
        places = [
            np.arange(len(blocks), dtype=np.int32) + (slot * self._blocks + known)
            for slot, known, blocks in added
        ]
        words = np.concatenate([*places, *(np.array(b, dtype=np.int32) for _, _, b in added)])
        staged = torch.empty(len(words), dtype=torch.int32, device=self._device)
        upload(words, staged)
        where, numbers = staged.view(2, -1)
        self.sequence.tables.view(-1).index_copy_(0, where.long(), numbers)

    def _write(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        length: int,
        root: int,
    ) -> None:
        words: NDArray[np.int32] = np.zeros(_FIELDS + self._blocks, dtype=np.int32)
        words[:_KEY_WORDS] = stream_keys(sampling).view(np.int32)
        words[_KEY_WORDS] = np.array([sampling.temperature], dtype=np.float32).view(np.int32)[0]
        words[_KEY_WORDS + 1 : _FIELDS] = (RULE_NUMBERS[sampling.effective_rule], length, root)
        words[_FIELDS : _FIELDS + len(blocks)] = blocks
        # A row is padded to the nodes of its launch. What those write past the session's blocks
        # goes where the padding slot's goes; the blocks of a table's past may be others' by now.
        words[_FIELDS + len(blocks) :] = self._padding_kv.blocks[0]
        staged = self._staged
        upload(words, staged)
        self.sampling.stream_keys[slot].copy_(staged[:_KEY_WORDS].view(torch.int64))
        fields = staged[_KEY_WORDS:_FIELDS]
        self.sampling.temperatures[slot : slot + 1].copy_(fields[0:1].view(torch.float32))
        self.sampling.rules[slot : slot + 1].copy_(fields[1:2])
        self.sequence.lengths[slot : slot + 1].copy_(fields[2:3])
        self.sequence.roots[slot : slot + 1].copy_(fields[3:4])
        self.sequence.tables[slot].copy_(staged[_FIELDS:])
