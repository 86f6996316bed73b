"""Draft replicas for verifiers of this host that exchange data directly between GPUs.

A replica is a copy of a verifier's session state on the drafter's device. The verifier offers
memory of its device and describes its buffers and KV pool; the drafter answers with memory of its
own device. From then on the verifier sends commands that say what to launch.

The drafting thread alone uses this module and serves all verifiers, so nothing here blocks, neither
for a verifier's round nor until a replica is built. Work that would block is left to later calls of
`run_waiting` and `build_step`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch

from outrider import timeline
from outrider.engine.device.current_device import gpu_uuid
from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.exchange.device_clock import DeviceClock
from outrider.engine.device.exchange.draft_replica import (
    DraftReplica,
    ReplicaRound,
    ReplicaSlots,
)
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    allocate_memory,
    map_memory,
)
from outrider.engine.device.exchange.round_history import READ_EVERY_S, RoundHistory
from outrider.engine.device.exchange.round_spans import DRAFTER_STEPS, RoundSpans
from outrider.engine.device.graphs.kernel_compilation import compile_kernels
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS
from outrider.engine.device.transfer.cuda_driver import StreamEvent, driver_for
from outrider.engine.heads import DraftHead
from outrider.engine.logits_processor import TokenHistory
from outrider.errors import (
    FailedPreconditionError,
    InvalidMessageError,
    OutriderError,
    UnavailableError,
)
from outrider.wire.messages import (
    MemoryKind,
    ReplicaAnswer,
    ReplicaBlocksAdded,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRefused,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    ReplicaSessionEnd,
    TensorDtype,
)

logger = logging.getLogger(__name__)

_MAX_REASON: Final = 1000
"""Maximum length of a refusal's reason in characters."""
ROUND_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds between the announcement of a round and the arrival of its data."""
_MAX_LAUNCHED: Final = 32
"""Maximum number of a replica's commands on its stream. Each command launches about 20 kernels at
most, and a full launch queue of the device (1024 entries) would block the thread."""
_MAX_WAITING: Final = 4096
"""Maximum number of a replica's further commands that wait for the stream."""
_USUAL_ROWS: Final = 128
"""Number of rows of a round for which kernels are compiled in advance. Larger buckets need few more
kernels."""
_USUAL_CHUNKS: Final = 64
"""Number of prefill chunks of a round for which kernels are compiled in advance; the default of a
verifier's `prefill_tokens_per_round`."""
_USUAL_DRAFT_LENGTH: Final = 4
_USUAL_DISTRIBUTION_IDS: Final = 2048
"""Default of a verifier's `exchange_distribution_ids`; `_USUAL_DRAFT_LENGTH` is the default of its
`draft_length`."""
_USUAL_SLOTS: Final = ReplicaSlots(num_blocks=128, block_tokens=16, table_blocks=128)
_BUILT: Final = object()


class _LaunchedCommands:
    """Commands of one replica that are on its stream and not completed."""

    def __init__(self, device: torch.device) -> None:
        self._driver = driver_for(device)
        self._under_way: deque[StreamEvent] = deque()
        self._free: list[StreamEvent] = []

    @property
    def is_full(self) -> bool:
        """Whether no further command may be launched now."""
        while self._under_way and self._under_way[0].is_complete:
            self._free.append(self._under_way.popleft())
        return len(self._under_way) >= _MAX_LAUNCHED

    def record(self) -> None:
        """Record that a command was launched on the current stream."""
        event = self._free.pop() if self._free else self._driver.make_event()
        event.record()
        self._under_way.append(event)


@dataclass(slots=True, eq=False)
class _VerifierReplica:
    """Replica of one verifier, with its waiting commands."""

    replica: DraftReplica
    offer: ReplicaOffer
    memory: tuple[SharedMemory, SharedMemory]
    """Memory of the verdict buffer and of the draft buffer. The replica owns both once it is
    attached."""
    stream: torch.cuda.Stream | None
    """Stream of the replica; None on a CPU. Each replica has a stream of its own, so that waiting
    for one verifier does not delay the others."""
    launches: _LaunchedCommands | None
    """Commands on the stream; None on a CPU, where commands run synchronously."""
    steps: Iterator[None] | None
    """Remaining steps of building the replica; None once the replica is attached."""
    commands: deque[ReplicaCommand] = field(default_factory=deque)
    """Commands that wait for a round or for the stream."""
    waiting_since: float = 0.0
    offered_at: float = field(default_factory=time.monotonic)
    longest_step_s: float = 0.0
    """Longest time in seconds that a step of building has blocked the thread."""
    spans: tuple[RoundHistory, RoundSpans] | None = None
    """Round history and spans that mark the rounds on the timeline; None if no timeline is
    recorded."""

    def mark_rounds(self) -> None:
        """Mark the rounds since the last call on the timeline, if a timeline is recorded."""
        if self.spans is not None:
            history, spans = self.spans
            for row in history.take_rows():
                spans.mark_round(row)

    @property
    def num_rows(self) -> int:
        """Number of KV rows of the replica."""
        return self.offer.num_blocks * self.offer.block_tokens


class Replicas:
    """Draft replicas for verifiers that use one EAGLE head, at most one for each connection."""

    def __init__(
        self,
        head: DraftHead,
        *,
        vocab_size: int,
        device: torch.device,
        cuda_graphs: bool,
        max_sessions: int,
        max_kv_rows: int,
    ) -> None:
        """Create the table without replicas. `max_sessions`: maximum number of sessions of one
        replica. `max_kv_rows`: maximum number of KV rows of all replicas together. Raises
        FailedPreconditionError if the head is not an EAGLE-3 head or if its weights are packed."""
        self._max_sessions, self._max_kv_rows = max_sessions, max_kv_rows
        self._weights, self._config = HeadWeights.from_head(head), head.config
        self._vocab_size, self._device = vocab_size, device
        self._is_cuda = device.type == "cuda"
        self._captures = cuda_graphs and self._is_cuda
        self._dtype = self._weights.embedding.dtype
        self._peers: dict[int, _VerifierReplica] = {}
        self._streams: list[torch.cuda.Stream] = []
        """Unused streams. They are reused together with the memory that torch caches for them."""
        self._clock = DeviceClock(device) if timeline.is_recording() else None
        self._mark_again = 0.0

    def warm_up(self) -> None:
        """Compile the kernels for verifiers of the usual sizes in advance, because compiling blocks
        the thread and delays all verifiers. For other sizes kernels are compiled when the verifier
        joins."""
        if not self._captures:
            return
        began = time.monotonic()
        shape = ExchangeShape(
            num_slots=_USUAL_ROWS + 1,
            max_rows=_USUAL_ROWS,
            draft_length=_USUAL_DRAFT_LENGTH,
            max_chunks=_USUAL_CHUNKS,
            chunk_tokens=CHUNK_TOKENS,
            feature_size=self._config.hidden_size,
            feature_dtype=self._dtype,
            distribution_entries=_USUAL_DISTRIBUTION_IDS,
        )
        stream = self._take_stream()
        with torch.cuda.stream(stream):
            _capture_all(self._new_replica(shape, _USUAL_SLOTS), self._device)
            torch.cuda.synchronize(self._device)
        self._give_stream(stream)
        # Exchange buffers are not allocated by torch, so torch must not keep the memory cached.
        torch.cuda.empty_cache()
        seconds = round(time.monotonic() - began, 1)
        logger.info("replica kernels compiled", extra={"seconds": seconds})

    @property
    def has_work(self) -> bool:
        """Whether `run_waiting` or `build_step` may have something to do."""
        return any(peer.steps is not None or peer.commands for peer in self._peers.values())

    def take_offer(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> ReplicaRefused | None:
        """Examine a verifier's offer of a replica. Return a refusal, or None if the replica is
        going to be built, in which case `build_step` returns the answer later. `descriptor`: file
        descriptor of the verifier's memory; this method closes it."""
        try:
            if descriptor is None:
                raise InvalidMessageError("the offer came without memory", reason="REPLICA")
            if connection in self._peers:
                raise InvalidMessageError("there is a replica already", reason="REPLICA")
            self._check(offer)
            stream = self._take_stream()
            try:
                with torch.cuda.stream(stream):
                    self._peers[connection] = self._new_peer(offer, descriptor, stream)
            except BaseException:
                self._give_stream(stream)
                raise
        except (OutriderError, RuntimeError) as error:
            return self._refuse(connection, error)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return None

    def _refuse(self, connection: int, error: Exception) -> ReplicaRefused:
        logger.warning("no replica", extra={"connection": connection, "reason": str(error)})
        self.close(connection)
        return ReplicaRefused(reason=str(error)[:_MAX_REASON] or "failed")

    def _check(self, offer: ReplicaOffer) -> None:
        if offer.gpu and offer.gpu == gpu_uuid(self._device):
            raise FailedPreconditionError(
                f"verifier and drafter are on one GPU ({offer.gpu}): a process that waits would "
                "keep it from the other",
                reason="REPLICA_GPU",
            )
        if offer.vocab_size != self._vocab_size or offer.feature_size != self._config.hidden_size:
            raise FailedPreconditionError(
                f"a replica is for {self._vocab_size} ids and features of "
                f"{self._config.hidden_size} values, not {offer.vocab_size} and "
                f"{offer.feature_size}",
                reason="REPLICA",
            )
        rows = offer.num_blocks * offer.block_tokens
        if offer.num_slots - 1 > self._max_sessions or offer.table_blocks > offer.num_blocks:
            raise FailedPreconditionError(
                f"a replica has at most {self._max_sessions} sessions (max_sessions), with tables "
                f"of at most all blocks, not {offer.num_slots - 1}, with {offer.table_blocks} of "
                f"{offer.num_blocks}",
                reason="REPLICA",
            )
        held = sum(peer.num_rows for peer in self._peers.values())
        if rows > self._max_kv_rows - held:
            raise FailedPreconditionError(
                f"replicas have at most {self._max_kv_rows} KV rows together (exchange_kv_rows), "
                f"{held} are taken, {rows} are asked for",
                reason="REPLICA_ROOM",
            )

    def _new_peer(
        self, offer: ReplicaOffer, descriptor: int, stream: torch.cuda.Stream | None
    ) -> _VerifierReplica:
        shape, on_device = _shape_of(offer), offer.memory is MemoryKind.DEVICE
        memory: list[SharedMemory] = []
        try:
            drafts = map_memory(
                descriptor, shape.draft_layout().num_bytes, self._device, on_device=on_device
            )
            memory.append(drafts)
            verdicts = self._allocate(shape.verdict_layout().num_bytes, on_device=on_device)
            memory.append(verdicts)
            slots = ReplicaSlots(offer.num_blocks, offer.block_tokens, offer.table_blocks)
            replica = self._new_replica(shape, slots)
        except BaseException:
            for each in memory:
                each.close()
            raise
        return _VerifierReplica(
            replica,
            offer,
            (verdicts, drafts),
            stream,
            _LaunchedCommands(self._device) if self._is_cuda else None,
            replica.capture_steps(),
        )

    def _allocate(self, num_bytes: int, *, on_device: bool) -> SharedMemory:
        try:
            return allocate_memory(num_bytes, self._device, on_device=on_device)
        except UnavailableError:
            if not self._is_cuda:
                raise
        # Torch still caches the memory of the graphs of earlier replicas.
        torch.cuda.empty_cache()
        return allocate_memory(num_bytes, self._device, on_device=on_device)

    def _new_replica(self, shape: ExchangeShape, slots: ReplicaSlots) -> DraftReplica:
        config = self._config
        return DraftReplica(
            lambda storage, rows: HeadForward(
                self._weights, storage=storage, block_tokens=slots.block_tokens, max_len=rows
            ),
            (1, config.num_kv_heads, config.head_dim),
            shape,
            slots,
            vocab_size=self._vocab_size,
            dtype=self._dtype,
            device=self._device,
            cuda_graphs=self._captures,
            # On a CPU the thread polls for rounds and never waits.
            timeout_us=int(ROUND_TIMEOUT_S * 1e6) if self._is_cuda else 0,
        )

    def run_waiting(self) -> list[tuple[int, str]]:
        """Execute the waiting commands that can run now without blocking the thread. Return a
        (connection, reason) pair for each replica that has failed."""
        lost: list[tuple[int, str]] = []
        for connection, peer in self._peers.items():
            if peer.commands:
                try:
                    self._run(peer)
                except OutriderError as error:
                    lost.append((connection, error.message))
        if self._clock is not None and time.monotonic() >= self._mark_again:
            self._mark_again = time.monotonic() + READ_EVERY_S
            for peer in self._peers.values():
                peer.mark_rounds()
        return lost

    def build_step(self) -> tuple[int, ReplicaAnswer, int | None] | None:
        """Do one step of building the replica that was offered first. When that replica is built or
        has failed, return its connection, the answer for the verifier, and the file descriptor of
        the drafter's memory (None after a failure). Return None otherwise. The caller sends the
        descriptor to the verifier and closes it."""
        for connection, peer in self._peers.items():
            if peer.steps is not None:
                return self._build(connection, peer, peer.steps)
        return None

    def _build(
        self, connection: int, peer: _VerifierReplica, steps: Iterator[None]
    ) -> tuple[int, ReplicaAnswer, int | None] | None:
        began = time.monotonic()
        try:
            with torch.cuda.stream(peer.stream):
                is_built = next(steps, _BUILT) is _BUILT
                peer.longest_step_s = max(peer.longest_step_s, time.monotonic() - began)
                if not is_built:
                    return None
                peer.steps = None
                peer.replica.attach(*peer.memory)
                shared = peer.memory[0].make_descriptor()
        except (OutriderError, RuntimeError) as error:
            return connection, self._refuse(connection, error), None
        facts = {
            "connection": connection,
            "graphs": len(peer.replica.graphs),
            "seconds": round(time.monotonic() - peer.offered_at, 2),
            "longest_step_ms": round(peer.longest_step_s * 1e3, 1),
        }
        logger.info("replica built", extra=facts)
        if self._clock is not None:
            self._clock.measure()
            mark = partial(timeline.mark_span, track=f"device exchange {connection}")
            spans = RoundSpans(self._clock, DRAFTER_STEPS, mark)
            peer.spans = RoundHistory(peer.replica.state.history.numpy()), spans
        return connection, ReplicaReady(memory=peer.offer.memory), shared

    def handle_command(self, connection: int, command: ReplicaCommand) -> None:
        """Execute a verifier's command for its replica now, or let `run_waiting` execute it later
        if it would block the thread. A command without a finished replica is ignored. Raises
        InvalidMessageError if the command is invalid, too many commands wait, or a round was
        missed."""
        peer = self._peers.get(connection)
        if peer is None or peer.steps is not None:
            return
        if len(peer.commands) >= _MAX_WAITING:
            raise InvalidMessageError("more commands than may wait", reason="REPLICA")
        if not peer.commands:
            peer.waiting_since = time.monotonic()
        peer.commands.append(command)
        self._run(peer)

    def _run(self, peer: _VerifierReplica) -> None:
        with torch.cuda.stream(peer.stream):
            while peer.commands and not self._must_wait(peer):
                _run_command(peer.replica, peer.commands.popleft())
                peer.waiting_since = time.monotonic()
                if peer.launches is not None:
                    peer.launches.record()
        if not peer.replica.is_open:
            raise InvalidMessageError("the replica has missed a round", reason="REPLICA")

    def _must_wait(self, peer: _VerifierReplica) -> bool:
        """Return whether executing the next command would block the thread. Raises
        InvalidMessageError if an announced round has not come in time."""
        if peer.launches is not None:
            return peer.launches.is_full
        if not isinstance(peer.commands[0], ReplicaRoundLaunched) or peer.replica.has_next_round:
            return False
        if time.monotonic() - peer.waiting_since > ROUND_TIMEOUT_S:
            raise InvalidMessageError("a round was announced and has not come", reason="REPLICA")
        return True

    def close(self, connection: int) -> None:
        """Free the replica of a connection that has ended or whose replica has failed;
        idempotent."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        with torch.cuda.stream(peer.stream):
            if peer.steps is None:
                peer.replica.detach()
                peer.mark_rounds()
            else:
                peer.steps = None
                if peer.stream is not None:
                    peer.stream.synchronize()
                for memory in peer.memory:
                    memory.close()
        self._give_stream(peer.stream)
        del peer
        if self._is_cuda and not self._peers:
            # Without replicas this delays no verifier.
            torch.cuda.empty_cache()

    def _take_stream(self) -> torch.cuda.Stream | None:
        if not self._is_cuda:
            return None
        if self._streams:
            return self._streams.pop()
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _give_stream(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self._streams.append(stream)


def _run_command(replica: DraftReplica, command: ReplicaCommand) -> None:
    match command:
        case ReplicaRoundLaunched():
            replica.launch_round(
                ReplicaRound(
                    command.rows,
                    command.chunks,
                    command.is_sampled,
                    command.is_ahead,
                    command.has_rejection,
                )
            )
        case ReplicaSessionBegin():
            replica.begin_session(
                command.slot,
                command.blocks,
                command.sampling,
                num_rows=command.num_rows,
                history=TokenHistory(
                    prompt_ids=np.array(command.prompt_ids, dtype=np.int32),
                    output_ids=np.array(command.output_ids, dtype=np.int32),
                ),
            )
        case ReplicaBlocksAdded():
            replica.add_blocks(command.slot, command.first, command.blocks)
        case ReplicaSessionEnd(slot=slot):
            replica.end_session(slot)
        case ReplicaOffer():
            raise InvalidMessageError("there is a replica already", reason="REPLICA")


def _shape_of(offer: ReplicaOffer) -> ExchangeShape:
    return ExchangeShape(
        num_slots=offer.num_slots,
        max_rows=offer.max_rows,
        draft_length=offer.draft_length,
        max_chunks=offer.max_chunks,
        chunk_tokens=offer.chunk_tokens,
        feature_size=offer.feature_size,
        feature_dtype=_torch_dtype(offer.feature_dtype),
        distribution_entries=offer.distribution_entries,
        depth=offer.depth,
        fan_out=offer.fan_out,
        ahead_rows=offer.ahead_rows,
    )


def _capture_all(replica: DraftReplica, device: torch.device) -> None:
    """Compile the kernels of a replica in parallel and capture its graphs."""

    def run() -> None:
        for _ in replica.capture_steps():
            pass

    compile_kernels(replica.graphs, device, lambda _: run())
    run()


def _torch_dtype(dtype: TensorDtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found
