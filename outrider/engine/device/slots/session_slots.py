"""Session slots: per-session state that the device keeps between rounds.

X slots, the last one for padding; T blocks of the longest sequence; K in-process drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.inputs.token_masks import AllowedTokenMasks
from outrider.engine.device.slots.free_slots import FreeSlots
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_NUMBERS,
    SamplingState,
    SequenceState,
    stream_keys,
)
from outrider.engine.kv_cache import KVPool, KVSequence
from outrider.errors import ResourceExhaustedError
from outrider.spec.sampling import SamplingParams

_KEY_WORDS = 2 * NUM_STREAMS
_HEAD: Final = Struct(f"={NUM_STREAMS}Qqf3i")
"""What a slot has beside its table: stream keys, its number, temperature, rule, length, root.
Numbers of 64 bits lie at even places."""
_FIELDS: Final = _HEAD.size // 4
"""Words of these."""
SLOTS_PER_WRITE: Final = 8
"""Slots that one launch writes."""
BLOCKS_PER_WRITE: Final = 64
"""Blocks that one launch adds to tables."""


class DeviceSessionSlots:
    """Allocates slots and writes their state, in stream order.

    Changes of slots reach the device with `upload_changes`, many of them with one copy and one
    launch: where hundreds of sessions are served, several begin in every round.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_sessions: int,
        max_len: int,
        max_nodes: int,
        vocab_size: int,
        device: torch.device,
        in_process_nodes: int = 0,
        graphs: bool = True,
    ) -> None:
        """`max_len`: most KV slots of a session; `max_nodes`: most nodes of a row;
        `in_process_nodes`: nodes of a row with drafts of this process's in-process drafter;
        `graphs`: on a CUDA device, whether a slot is written by a graph."""
        pool.use_block_tables()
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
        self.warp = LogitsSlots(count, vocab_size, device)
        """What the sessions do to the target's logits."""
        self.allowed = AllowedTokenMasks(
            max_sessions=max_sessions,
            max_nodes=max_nodes,
            in_process_nodes=in_process_nodes,
            vocab_size=vocab_size,
            device=device,
        )
        """What their grammars allow, launch by launch."""
        self._pool, self._device, self._blocks = pool, device, blocks
        # An even number of words: those of 64 bits are to be aligned in every row.
        self._width = _FIELDS + blocks + blocks % 2
        self._staged = zeros(SLOTS_PER_WRITE * self._width + 3 * BLOCKS_PER_WRITE)
        """What a launch writes: rows of slots, then the places of added blocks and these."""
        self._begun: dict[int, NDArray[np.int32]] = {}
        """The rows of slots that the device was not told of, [width] each."""
        # One launch for all fields: a session waits for every one of them before its first round.
        self._graphs = GraphCache(device, enabled=graphs)
        padding, held = SamplingParams(), self._padding_kv.blocks
        # What is left of a launch says again where the padding slot begins. Places are of 64 bits,
        # as the copy wants them: in front, where they are aligned.
        self._no_places = np.full(BLOCKS_PER_WRITE, self.padding * blocks, np.int64)
        self._no_blocks = np.full(BLOCKS_PER_WRITE, held[0], np.int32)
        self._nobody = self._row(self.padding, held, padding, length=1, root=0)
        # Captured now: no session is to wait for it later.
        for rows in ([], [self._nobody], [self._nobody] * SLOTS_PER_WRITE):
            self._write(rows, [], [])

    def check_blocks(self, count: int) -> None:
        """Raises ResourceExhaustedError for more KV blocks than a slot's table holds."""
        if count > self._blocks:
            raise ResourceExhaustedError(
                f"the session needs {count} KV blocks, a slot's table holds {self._blocks}",
                reason="CONTEXT_TOO_LONG",
            )

    def open_slot(self, kv: KVSequence) -> int:
        """A slot for a session. Raises ResourceExhaustedError when all are taken, or when it has
        more KV blocks than a slot's table holds."""
        self.check_blocks(kv.num_blocks)
        return self._free.take_slot()

    def close_slot(self, slot: int) -> None:
        """Give a slot back; rounds in flight may still write to it."""
        self._free.return_slot(slot)

    def release_padding(self) -> None:
        """Give the padding slot's blocks back; the slots are of no use afterwards."""
        self._padding_kv.release()
        self._pool.use_block_tables(False)

    def begin_session(
        self,
        slot: int,
        kv: KVSequence,
        sampling: SamplingParams,
        *,
        length: int = 1,
        root: int = 0,
    ) -> None:
        """The host's word on a slot's session: `length` committed tokens, the last one `root`."""
        self._begun[slot] = self._row(slot, kv.blocks, sampling, length=length, root=root)

    def upload_changes(self, added: Sequence[tuple[int, int, Sequence[int]]] = ()) -> None:
        """Write what was said of slots that begin, and that sessions hold more blocks, `added`: of
        each the slot, how many of them the slot's table has, and the others."""
        places: list[int] = []
        held: list[int] = []
        for slot, known, blocks in added:
            first = slot * self._blocks + known
            places.extend(range(first, first + len(blocks)))
            held.extend(blocks)
        rows = list(self._begun.values())
        # Blocks are added to what was written before.
        while len(rows) > SLOTS_PER_WRITE:
            self._write(rows[:SLOTS_PER_WRITE], [], [])
            del rows[:SLOTS_PER_WRITE]
        while rows or held:
            self._write(rows, places[:BLOCKS_PER_WRITE], held[:BLOCKS_PER_WRITE])
            rows = []
            del places[:BLOCKS_PER_WRITE], held[:BLOCKS_PER_WRITE]
        self._begun.clear()

    def _row(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        length: int,
        root: int,
    ) -> NDArray[np.int32]:
        words: NDArray[np.int32] = np.empty(self._width, dtype=np.int32)
        rule, keys = RULE_NUMBERS[sampling.effective_rule], stream_keys(sampling)
        _HEAD.pack_into(words.data, 0, *keys, slot, sampling.temperature, rule, length, root)
        words[_FIELDS : _FIELDS + len(blocks)] = blocks
        # A row is padded to the nodes of its launch. What those write past the session's blocks
        # goes where the padding slot's goes; the blocks of a table's past may be others' by now.
        words[_FIELDS + len(blocks) :] = self._padding_kv.blocks[0]
        return words

    def _write(self, rows: list[NDArray[np.int32]], places: list[int], held: list[int]) -> None:
        """Write at most SLOTS_PER_WRITE slots, then at most BLOCKS_PER_WRITE blocks to these places
        of all tables."""
        where, numbers = self._no_places, self._no_blocks
        if held:
            where, numbers = where.copy(), numbers.copy()
            where[: len(held)], numbers[: len(held)] = places, held
        # Where few are served they begin one by one, and their tables may be long.
        count = len(rows) if len(rows) < 2 else SLOTS_PER_WRITE
        staged = self._staged[: count * self._width + 3 * BLOCKS_PER_WRITE]
        upload_int32s(
            staged, *rows, *[self._nobody] * (count - len(rows)), where.view(np.int32), numbers
        )
        self._graphs.run_graph(("slots", count), partial(self._spread, staged, count))

    def _spread(self, staged: Tensor, count: int) -> None:
        """From `count` staged rows to where the slots that they name keep them; then what follows
        them to the tables."""
        if count:
            self._begin(staged[: count * self._width].view(count, self._width))
        added = staged[count * self._width :]
        where, numbers = (
            added[: 2 * BLOCKS_PER_WRITE].view(torch.int64),
            added[2 * BLOCKS_PER_WRITE :],
        )
        self.sequence.tables.view(-1).index_copy_(0, where, numbers)

    def _begin(self, rows: Tensor) -> None:
        """Rows [n, width] of slots that begin."""
        sampling, sequence = self.sampling, self.sequence
        keys, fields = rows[:, :_KEY_WORDS].view(torch.int64), rows[:, _KEY_WORDS:_FIELDS]
        slots = fields[:, 0:2].view(torch.int64)[:, 0]
        sampling.stream_keys.index_copy_(0, slots, keys)
        sampling.temperatures.index_copy_(0, slots, fields[:, 2:3].view(torch.float32)[:, 0])
        sampling.rules.index_copy_(0, slots, fields[:, 3])
        sequence.lengths.index_copy_(0, slots, fields[:, 4])
        sequence.roots.index_copy_(0, slots, fields[:, 5])
        sequence.tables.index_copy_(0, slots, rows[:, _FIELDS : _FIELDS + self._blocks])
