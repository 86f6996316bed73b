"""Draft model that serves one verifier from another GPU and reads its rounds from exchange buffers.

The replica copies the verifier's session slots and block tables and uses the same KV slot numbers,
so the verifier's host manages both KV caches. After each round the replica does the work of an
in-process drafter. Its own host only launches work: first the changes of slots and blocks that the
verifier's host announces, then the graphs of a round, which wait on the device until the data of
that round arrive.

Shapes: X session slots, T blocks of a table, L layers, S KV slots, G key/value heads, d head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import DraftForward, NewRows
from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.look_ahead_drafter import LookAheadDrafter
from outrider.engine.device.exchange.memory import SharedMemory
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shapes import bucket_for
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.device.trial_capture import outside_capture
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.drafts.distribution_sampling import with_target_ids
from outrider.engine.kernels.exchange.buffers import CHUNK_ROWS, DECODE_ROWS
from outrider.engine.kernels.exchange.drafts import put_drafts
from outrider.engine.kernels.exchange.drafts_ahead import put_outcomes
from outrider.engine.kernels.exchange.numbers import is_round_there, publish_number, wait_round
from outrider.engine.kernels.exchange.verdicts import (
    NO_SLOT,
    FollowedSlots,
    TakenRows,
    new_taken_rows,
    take_rows,
)
from outrider.engine.kernels.logits_processor.process import count_tokens
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_NUMBERS,
    SamplingState,
    stream_key_row,
)
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory
from outrider.errors import InvalidMessageError
from outrider.spec.sampling import SamplingParams


class ReplicaSlots(NamedTuple):
    """Sizes of the verifier's KV pool and block tables."""

    num_blocks: int
    """Number of KV blocks of the verifier's pool."""
    block_tokens: int
    """Number of KV slots of a block."""
    table_blocks: int
    """Number T of blocks of a block table."""


class ReplicaRound(NamedTuple):
    """Shape and options of a round. The verifier sends them by message before the round's data
    arrive in the exchange buffers."""

    rows: int
    """Number of rows to draft for, including padding of the bucket; 0 for none."""
    chunks: int
    """Number of prefill chunks, including padding of the bucket; 0 for none."""
    is_sampled: bool
    """Whether any session uses the logits processor or draws its draft tokens at random."""
    is_ahead: bool = False
    """Whether to draft also for outcomes of the next round, while that round runs on the
    verifier."""
    has_rejection: bool = False
    """Whether any session has the rejection rule. Its drafts are then sent with their
    distributions. Only set if `is_sampled` is."""


class DraftReplica:
    """Follows one verifier's rounds and drafts a chain for each of its sessions."""

    def __init__(
        self,
        make_forward: Callable[[Tensor, int], DraftForward],
        kv_shape: tuple[int, int, int],
        shape: ExchangeShape,
        slots: ReplicaSlots,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cuda_graphs: bool = True,
        timeout_us: int = 5_000_000,
    ) -> None:
        """`make_forward`: function that builds the draft model for a KV storage [2, L, G, S, d] and
        a maximum number of rows of a session. `kv_shape`: (L, G, d). `timeout_us`: maximum time
        that the device waits for an announced round, in microseconds."""
        self.exchange_shape, self._sizes = shape, slots
        self._vocab_size, self._device = vocab_size, device
        count, self._padding = shape.num_slots, shape.num_slots - 1
        layers, heads, dim = kv_shape
        # One block more than the verifier has: what is written past a table's end goes there.
        branches = LookAheadDrafter.blocks_needed(
            outcomes=shape.fan_out,
            length=shape.draft_length,
            max_rows=shape.ahead_rows,
            block_tokens=slots.block_tokens,
        )
        pool = (slots.num_blocks + 1 + branches) * slots.block_tokens
        with torch.inference_mode(False):
            self.storage = torch.zeros((2, layers, heads, pool, dim), dtype=dtype, device=device)
            self.tables = torch.full(
                (count, slots.table_blocks), slots.num_blocks, dtype=torch.int32, device=device
            )
            self._sampling = SamplingState(
                stream_keys=torch.zeros((count, NUM_STREAMS), dtype=torch.int64, device=device),
                temperatures=torch.zeros(count, dtype=torch.float32, device=device),
                rules=torch.zeros(count, dtype=torch.int32, device=device),
            )
            own = torch.arange(count, dtype=torch.int32, device=device)
            self._followed = FollowedSlots(
                slot_of=torch.full_like(own, NO_SLOT),
                num_rows=torch.zeros_like(own),
                max_rows=torch.zeros_like(own),
            )
        forward = make_forward(self.storage, slots.table_blocks * slots.block_tokens)
        self._program = LookAheadProgram(forward)
        self._ahead: LookAheadDrafter | None = None
        if branches:
            self._ahead = LookAheadDrafter(
                self._program,
                tables=self.tables,
                sampling=self._sampling,
                outcomes=shape.fan_out,
                length=shape.draft_length,
                max_rows=shape.ahead_rows,
                first_block=slots.num_blocks + 1,
            )
        vocabulary = forward.vocabulary
        ids = vocabulary.target_ids
        self._ids_increase = bool((ids[1:] > ids[:-1]).all())
        self.distribution_limits: DistributionLimits | None = None
        """Size limits of the draft distributions of sessions with the rejection rule; None if
        drafts have no distributions."""
        if shape.distribution_entries:
            self.distribution_limits = DistributionLimits(max_ids=shape.distribution_entries)
        self._warp = LogitsSlots(
            count, len(vocabulary.target_ids), device, draft_columns=vocabulary.draft_columns
        )
        self._side = ExchangeSide(shape, device, timeout_us=timeout_us)
        self._verdicts, self._drafts = self._side.verdicts, self._side.drafts
        self.state = self._side.state
        self.graphs = GraphCache(device, enabled=cuda_graphs)
        self._rows: dict[int, TakenRows] = {}
        self._chunks: dict[int, TakenRows] = {}

    def attach(self, own: SharedMemory, peer: SharedMemory) -> None:
        """Start the exchange with a verifier, in stream order.

        own: memory of this process, in which the verifier writes its rounds. peer: memory of the
        verifier, in which this process writes drafts. `detach` closes both.
        """
        self._side.attach(verdicts=own, drafts=peer)

    @property
    def is_open(self) -> bool:
        """Whether an exchange is in progress and no announced round has been missed, according to
        the device's last report."""
        return self._side.is_open

    @property
    def has_next_round(self) -> bool:
        """Whether `launch_round` would return without waiting for the verifier. On CUDA it always
        does, because the graphs wait on the device. On a CPU the calling thread waits for the
        round."""
        return self._device.type == "cuda" or is_round_there(self._verdicts, self.state)

    def detach(self) -> None:
        """End the exchange and close its memory. Cancels waits on the device, then waits for
        launched work."""
        self._side.detach()
        self._followed.slot_of.fill_(NO_SLOT)

    @torch.inference_mode()
    def begin_session(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        num_rows: int,
        history: TokenHistory = EMPTY_HISTORY,
    ) -> None:
        """Begin a session in a slot.

        num_rows: number of draft rows whose KV is already in `blocks`. history: the session's
        tokens so far, which penalties need. Tokens of later rounds are added on the device. Raises
        InvalidMessageError for slots, blocks or rows out of range.
        """
        self._check(slot, 0, blocks)
        held = len(blocks) * self._sizes.block_tokens
        if not 0 <= num_rows <= held:
            raise InvalidMessageError(f"num_rows must be in [0, {held}], got {num_rows}")
        self.tables[slot].fill_(self._sizes.num_blocks)
        self._write_table(slot, 0, blocks)
        state = self._sampling
        keys = stream_key_row(sampling).view(np.int32)
        upload_int32s(state.stream_keys[slot].view(torch.int32), keys)
        state.temperatures[slot] = sampling.temperature
        state.rules[slot] = RULE_NUMBERS[sampling.effective_rule]
        self._warp.begin_session(
            slot, sampling, prompt_ids=history.prompt_ids, output_ids=history.output_ids
        )
        followed = self._followed
        followed.num_rows[slot], followed.max_rows[slot] = num_rows, held
        followed.slot_of[slot] = slot

    @torch.inference_mode()
    def add_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Add KV blocks to a session's block table, from index `first` on. Raises
        InvalidMessageError for slots or blocks out of range."""
        self._check(slot, first, blocks)
        self._write_table(slot, first, blocks)
        held = first + len(blocks)
        self._followed.max_rows[slot] = held * self._sizes.block_tokens

    @torch.inference_mode()
    def end_session(self, slot: int) -> None:
        """End the session of a slot. Raises InvalidMessageError for a slot out of range."""
        self._check(slot, 0, ())
        self._followed.slot_of[slot] = NO_SLOT

    def _write_table(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        # No copy may wait for the stream: its graphs wait for the verifier, and others wait for
        # this thread.
        upload_int32s(
            self.tables[slot, first : first + len(blocks)], np.array(blocks, dtype=np.int32)
        )

    def _check(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        sizes = self._sizes
        if not 0 <= slot < self._padding:
            raise InvalidMessageError(f"slot must be in [0, {self._padding}), got {slot}")
        if first < 0 or first + len(blocks) > sizes.table_blocks:
            raise InvalidMessageError(
                f"a table has {sizes.table_blocks} blocks, got {len(blocks)} from {first} on"
            )
        given = np.asarray(blocks, dtype=np.int64)
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < sizes.num_blocks:
            raise InvalidMessageError(f"blocks must be in [0, {sizes.num_blocks})")

    @torch.inference_mode()
    def launch_round(self, announced: ReplicaRound) -> None:
        """Launch the graphs that draft after a round of the verifier. They wait for that round on
        the device. Raises InvalidMessageError for a round that the buffers cannot hold."""
        shape = self.exchange_shape
        if not (
            0 <= announced.rows <= shape.max_rows and 0 <= announced.chunks <= shape.max_chunks
        ):
            raise InvalidMessageError(
                f"a round has up to {shape.max_rows} rows and {shape.max_chunks} chunks, got "
                f"{announced.rows} and {announced.chunks}"
            )
        if announced.is_ahead and (self._ahead is None or announced.rows > shape.ahead_rows):
            raise InvalidMessageError(
                f"outcomes are drafted for up to {shape.ahead_rows} rows, got {announced.rows}"
            )
        self._launch(announced)

    def capture_steps(self) -> Iterator[None]:
        """Return an iterator that compiles the kernels and captures all graphs, one step in each
        iteration; see `GraphCache.capture_steps`. Run it before `attach`, because rounds would wait
        too long for compilation."""
        shape, steps = self.exchange_shape, self.graphs.capture_steps
        yield from steps("wait", self._wait)
        for chunks in _buckets(shape.max_chunks):
            yield from steps(("chunks", chunks), partial(self._run_chunks, chunks))
        kinds = [
            (False, None),
            (True, None),
            *([(True, self.distribution_limits)] if self.distribution_limits else []),
        ]
        for ahead, most in ((False, shape.max_rows), (True, shape.ahead_rows)):
            for rows in _buckets(most if self._ahead or not ahead else 0):
                for sampled, limits in kinds:
                    run = partial(self._run_drafts, rows, limits, sampled=sampled, is_ahead=ahead)
                    yield from steps(("drafts", rows, sampled, ahead, limits is not None), run)
        yield from steps("publish", self._publish)

    def _launch(self, announced: ReplicaRound) -> None:
        # A bucket may have more rows than were put: those behind them say that they are none.
        shape, run = self.exchange_shape, self.graphs.run_graph
        run("wait", self._wait)
        if announced.chunks:
            chunks = bucket_for(announced.chunks, _buckets(shape.max_chunks))
            run(("chunks", chunks), lambda: self._run_chunks(chunks))
        sampled, is_ahead = announced.is_sampled, announced.is_ahead
        limits = self.distribution_limits if sampled and announced.has_rejection else None
        if announced.rows:
            most = shape.ahead_rows if is_ahead else shape.max_rows
            rows = bucket_for(announced.rows, _buckets(most))
            run(
                ("drafts", rows, sampled, is_ahead, limits is not None),
                lambda: self._run_drafts(rows, limits, sampled=sampled, is_ahead=is_ahead),
            )
        else:
            run("publish", self._publish)

    def _wait(self) -> None:
        wait_round(self._verdicts, self.state)

    def _publish(self) -> None:
        publish_number(self._drafts, self.state, step=0)

    def _run_chunks(self, count: int) -> None:
        """Write the KV of the round's prefill chunks."""
        taken = self._taken(self._chunks, count, self.exchange_shape.chunk_tokens)
        self._take(CHUNK_ROWS, taken, rows_ahead=0)
        self._program.forward.write_rows(self._new_rows(taken))

    def _run_drafts(
        self, count: int, limits: DistributionLimits | None, *, sampled: bool, is_ahead: bool
    ) -> None:
        """Take the rows of the round, draft for them, and draft for outcomes of these drafts if
        `is_ahead` is set. limits: limits of the distributions of sessions with the rejection rule;
        None if there are no such sessions."""
        shape, ahead = self.exchange_shape, self._ahead if is_ahead else None
        taken = self._taken(self._rows, count, shape.num_nodes)
        # The last draft token of a chain is drafted behind, and has no KV.
        self._take(DECODE_ROWS, taken, rows_ahead=shape.draft_length - 1)
        rows, warp = self._new_rows(taken), self._warp.state if sampled else None
        if warp is not None:
            columns = self._warp.draft_columns
            count_tokens(taken.tokens, taken.counts, warp, taken.slots, columns=columns)
        drafted = self._program.draft_chain(
            rows,
            length=shape.draft_length,
            state=self._sampling,
            warp=warp,
            distribution_limits=limits,
            mixed_rules=True,
            with_levels=ahead is not None,
            given=None if ahead is None else ahead.chosen_columns(taken),
        )
        distributions = drafted.distributions
        if distributions is not None:
            ids = self._program.forward.vocabulary.target_ids
            distributions = with_target_ids(distributions, ids, is_increasing=self._ids_increase)
        put_drafts(
            self._drafts,
            self.state,
            taken,
            drafted.tokens,
            distributions,
            length=shape.draft_length,
            entries=shape.distribution_entries,
        )
        self._publish()
        if ahead is not None:
            outcomes = ahead.draft_outcomes(taken, rows, drafted, warp)
            put_outcomes(self._drafts, self.state, taken, *outcomes)

    def _take(self, first: int, taken: TakenRows, *, rows_ahead: int) -> None:
        take_rows(
            self._verdicts,
            self.state,
            self._followed,
            taken,
            first=first,
            padding=self._padding,
            vocab_size=self._vocab_size,
            rows_ahead=rows_ahead,
        )

    def _taken(self, known: dict[int, TakenRows], count: int, width: int) -> TakenRows:
        taken = known.get(count)
        if taken is None:
            shape = self.exchange_shape
            with outside_capture(self._device):
                taken = known[count] = new_taken_rows(
                    count, width, shape.feature_size, shape.feature_dtype, self._device
                )
        return taken

    def _new_rows(self, taken: TakenRows) -> NewRows:
        return NewRows(
            slots=taken.slots,
            tables=self.tables,
            tokens=taken.tokens,
            features=taken.features,
            counts=taken.counts,
            starts=taken.starts,
        )


def _buckets(most: int) -> tuple[int, ...]:
    """Return the bucket sizes for up to `most` rows or chunks: powers of two, and `most` itself."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*sizes, most) if most else ()
