"""Session slots: per-session state that the device keeps between rounds."""

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
"""Fields of a slot's row before its block table: stream keys, slot number, temperature, rule,
length, root. Fields of 64 bits lie at even word offsets."""
_FIELDS: Final = _HEAD.size // 4
"""Number of int32 words of `_HEAD`."""
SLOTS_PER_WRITE: Final = 8
"""Maximum number of slots that one launch writes."""
BLOCKS_PER_WRITE: Final = 64
"""Maximum number of blocks that one launch adds to block tables."""


class DeviceSessionSlots:
    """Allocates session slots and writes their state to the device, in stream order.

    Changes are collected on the host until `upload_changes` writes them to the device. It writes
    many changes by one copy and one launch, because several sessions begin in every round if there
    are hundreds of them.
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
        """`max_len`: maximum number of KV slots of a session. `max_nodes`: maximum number of nodes
        of a row, including the root. `in_process_nodes`: number of nodes of a row with in-process
        drafts; 0 without an in-process drafter. `graphs`: whether slots are written by a CUDA graph
        if the device is a CUDA device."""
        pool.use_block_tables()
        self._free = FreeSlots(max_sessions, reason="SESSIONS_EXHAUSTED")
        self.padding = self._free.padding
        count, blocks = self._free.total, pool.blocks_for(max_len)
        # Padding rows write the nodes of a round and the steps of a draft after them.
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
        """State of the sessions' logits processor over the target's vocabulary."""
        self.allowed = AllowedTokenMasks(
            max_sessions=max_sessions,
            max_nodes=max_nodes,
            in_process_nodes=in_process_nodes,
            vocab_size=vocab_size,
            device=device,
        )
        """Masks of the tokens that grammars allow, which are filled for each launch."""
        self._pool, self._device, self._blocks = pool, device, blocks
        # An even number of words keeps fields of 64 bits aligned in every row.
        self._width = _FIELDS + blocks + blocks % 2
        self._staged = zeros(SLOTS_PER_WRITE * self._width + 3 * BLOCKS_PER_WRITE)
        """Staged words of a launch: rows of slots, then int64 table positions of added blocks, then
        the block ids."""
        self._begun: dict[int, NDArray[np.int32]] = {}
        """Rows of new sessions that are not uploaded yet, [width] each, by slot."""
        # All fields are written by one launch, because a session waits for every one of them
        # before its first round.
        self._graphs = GraphCache(device, enabled=graphs)
        padding, held = SamplingParams(), self._padding_kv.blocks
        # Unused entries of a launch rewrite the first block of the padding slot. Positions are
        # int64, as the copy requires, and come first, where they are aligned.
        self._no_places = np.full(BLOCKS_PER_WRITE, self.padding * blocks, np.int64)
        self._no_blocks = np.full(BLOCKS_PER_WRITE, held[0], np.int32)
        self._nobody = self._row(self.padding, held, padding, length=1, root=0)
        # Capture the graphs now, so that no session waits for it later.
        for rows in ([], [self._nobody], [self._nobody] * SLOTS_PER_WRITE):
            self._write(rows, [], [])

    def check_blocks(self, count: int) -> None:
        """Raise ResourceExhaustedError if `count` KV blocks exceed the size of a block table."""
        if count > self._blocks:
            raise ResourceExhaustedError(
                f"the session needs {count} KV blocks, a slot's table holds {self._blocks}",
                reason="CONTEXT_TOO_LONG",
            )

    def open_slot(self, kv: KVSequence) -> int:
        """Take a slot for a session and return it. Raises ResourceExhaustedError if all slots are
        taken or if the session has more KV blocks than a block table holds."""
        self.check_blocks(kv.num_blocks)
        return self._free.take_slot()

    def close_slot(self, slot: int) -> None:
        """Free a slot. Rounds in flight may still write to it."""
        self._free.return_slot(slot)

    def release_padding(self) -> None:
        """Free the KV blocks of the padding slot. The slots cannot be used afterwards."""
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
        """Set the state of a slot's new session. `length`: number of its committed tokens. `root`:
        the last of them. The state reaches the device with the next `upload_changes`."""
        self._begun[slot] = self._row(slot, kv.blocks, sampling, length=length, root=root)

    def upload_changes(self, added: Sequence[tuple[int, int, Sequence[int]]] = ()) -> None:
        """Write the state of new sessions and the KV blocks added to sessions to the device.

        `added`: one tuple for each session that gets blocks: its slot, the number of blocks already
        in its block table, and the blocks to append.
        """
        places: list[int] = []
        held: list[int] = []
        for slot, known, blocks in added:
            first = slot * self._blocks + known
            places.extend(range(first, first + len(blocks)))
            held.extend(blocks)
        rows = list(self._begun.values())
        # Rows are written first, because blocks are appended to their tables.
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
        # Rows are padded to the nodes of their launch. KV that padding writes past the session's
        # blocks goes to the padding slot's block, because other blocks may belong to other
        # sessions.
        words[_FIELDS + len(blocks) :] = self._padding_kv.blocks[0]
        return words

    def _write(self, rows: list[NDArray[np.int32]], places: list[int], held: list[int]) -> None:
        """Write at most SLOTS_PER_WRITE rows of slots, then at most BLOCKS_PER_WRITE blocks at
        these positions of the flattened tables."""
        where, numbers = self._no_places, self._no_blocks
        if held:
            where, numbers = where.copy(), numbers.copy()
            where[: len(held)], numbers[: len(held)] = places, held
        # With few sessions, they begin one by one, and their tables may be long.
        count = len(rows) if len(rows) < 2 else SLOTS_PER_WRITE
        staged = self._staged[: count * self._width + 3 * BLOCKS_PER_WRITE]
        upload_int32s(
            staged, *rows, *[self._nobody] * (count - len(rows)), where.view(np.int32), numbers
        )
        self._graphs.run_graph(("slots", count), partial(self._spread, staged, count))

    def _spread(self, staged: Tensor, count: int) -> None:
        """Copy `count` staged rows to the state of their slots, then the staged blocks to the
        tables."""
        if count:
            self._begin(staged[: count * self._width].view(count, self._width))
        added = staged[count * self._width :]
        where, numbers = (
            added[: 2 * BLOCKS_PER_WRITE].view(torch.int64),
            added[2 * BLOCKS_PER_WRITE :],
        )
        self.sequence.tables.view(-1).index_copy_(0, where, numbers)

    def _begin(self, rows: Tensor) -> None:
        """Copy rows [n, width] of new sessions to the state of their slots."""
        sampling, sequence = self.sampling, self.sequence
        keys, fields = rows[:, :_KEY_WORDS].view(torch.int64), rows[:, _KEY_WORDS:_FIELDS]
        slots = fields[:, 0:2].view(torch.int64)[:, 0]
        sampling.stream_keys.index_copy_(0, slots, keys)
        sampling.temperatures.index_copy_(0, slots, fields[:, 2:3].view(torch.float32)[:, 0])
        sampling.rules.index_copy_(0, slots, fields[:, 3])
        sequence.lengths.index_copy_(0, slots, fields[:, 4])
        sequence.roots.index_copy_(0, slots, fields[:, 5])
        sequence.tables.index_copy_(0, slots, rows[:, _FIELDS : _FIELDS + self._blocks])
