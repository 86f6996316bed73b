"""Session slots: what the device keeps of each session from one round to the next.

X slots, the last one for padding; T blocks of the longest sequence; K own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.free_slots import FreeSlots
from outrider.engine.device.graphs import GraphCache
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
_FIELDS = _KEY_WORDS + 6
"""Words of a slot beside its table: stream keys, its number (2), temperature, rule, length, root.
Numbers of 64 bits lie at even places."""
_GROWN: Final = 64
"""Blocks that one launch adds to tables."""


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
        graphs: bool = True,
    ) -> None:
        """`max_len`: most K/V slots of a session; `max_nodes`: most nodes of a row; `own_nodes`:
        nodes of a row with drafts of this process's own head; `graphs`: on a CUDA device, whether a
        slot is written by a graph."""
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
        self._added = zeros(3 * _GROWN)
        # One launch for all fields: a session waits for every one of them before its first round.
        self._graphs = GraphCache(device, enabled=graphs)
        self._write(self.padding, self._padding_kv.blocks, SamplingParams(), length=1, root=0)
        # Captured now: no session is to wait for it later.
        self._add([], [])

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
        places: list[int] = []
        held: list[int] = []
        for slot, known, blocks in added:
            first = slot * self._blocks + known
            places.extend(range(first, first + len(blocks)))
            held.extend(blocks)
        for start in range(0, len(held), _GROWN):
            self._add(places[start : start + _GROWN], held[start : start + _GROWN])

    def _add(self, places: list[int], held: list[int]) -> None:
        """Write blocks to these places of all tables, at most _GROWN."""
        # What is left of the launch says again where the padding slot begins.
        left = _GROWN - len(held)
        where = np.array(places + [self.padding * self._blocks] * left, np.int64)
        numbers = np.array(held + [self._padding_kv.blocks[0]] * left, np.int32)
        # Places are of 64 bits, as the copy wants them: in front, where they are aligned.
        upload(self._added, where.view(np.int32), numbers)
        self._graphs.run("grow", self._extend)

    def _extend(self) -> None:
        """From the added words to the tables."""
        where, numbers = self._added[: 2 * _GROWN].view(torch.int64), self._added[2 * _GROWN :]
        self.sequence.tables.view(-1).index_copy_(0, where, numbers)

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
        words[_KEY_WORDS : _KEY_WORDS + 2] = np.array([slot], dtype=np.int64).view(np.int32)
        words[_KEY_WORDS + 2] = np.array([sampling.temperature], dtype=np.float32).view(np.int32)[0]
        words[_KEY_WORDS + 3 : _FIELDS] = (RULE_NUMBERS[sampling.effective_rule], length, root)
        words[_FIELDS : _FIELDS + len(blocks)] = blocks
        # A row is padded to the nodes of its launch. What those write past the session's blocks
        # goes where the padding slot's goes; the blocks of a table's past may be others' by now.
        words[_FIELDS + len(blocks) :] = self._padding_kv.blocks[0]
        upload(self._staged, words)
        self._graphs.run("write", self._spread)

    def _spread(self) -> None:
        """From the staged words to where the slot that they name keeps them."""
        staged, sampling, sequence = self._staged, self.sampling, self.sequence
        keys, fields = staged[:_KEY_WORDS].view(torch.int64), staged[_KEY_WORDS:_FIELDS]
        slot = fields[0:2].view(torch.int64)
        sampling.stream_keys.index_copy_(0, slot, keys[None])
        sampling.temperatures.index_copy_(0, slot, fields[2:3].view(torch.float32))
        sampling.rules.index_copy_(0, slot, fields[3:4])
        sequence.lengths.index_copy_(0, slot, fields[4:5])
        sequence.roots.index_copy_(0, slot, fields[5:6])
        sequence.tables.index_copy_(0, slot, staged[None, _FIELDS:])
