"""Replicas for the verifiers of this host that exchange between devices; drafting thread only.

A verifier offers memory of its device and says what its buffers and its K/V pool are like; the
answer is memory of this drafter's device. From then on the verifier says what to launch.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

import torch

from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
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
from outrider.engine.heads import DraftHead
from outrider.errors import FailedPreconditionError, InvalidMessageError, OutriderError
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
"""Characters of a refusal."""


class Replicas:
    """The replicas of one EAGLE head, one for each connection that asked for one."""

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
        """`max_sessions`, `max_kv_rows`: of one replica. Raises FailedPreconditionError for heads
        without plain EAGLE-3 weights."""
        self._max_sessions, self._max_kv_rows = max_sessions, max_kv_rows
        self._weights, self._config = HeadWeights.from_head(head), head.config
        self._vocab_size, self._device, self._cuda_graphs = vocab_size, device, cuda_graphs
        self._dtype = self._weights.embedding.dtype
        self._replicas: dict[int, DraftReplica] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def make_replica(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> tuple[ReplicaAnswer, int | None]:
        """Take an offer up, with the descriptor of the verifier's memory, which is closed here: the
        answer, and the descriptor of this side's memory for the caller to pass on and close."""
        try:
            if descriptor is None:
                raise InvalidMessageError("the offer came without memory", reason="REPLICA")
            if connection in self._replicas:
                raise InvalidMessageError("there is a replica already", reason="REPLICA")
            with torch.cuda.stream(self._stream(connection)):
                shared = self._attach(connection, offer, descriptor)
        except (OutriderError, RuntimeError) as error:
            logger.warning("no replica", extra={"connection": connection, "reason": str(error)})
            self.close(connection)
            return ReplicaRefused(reason=str(error)[:_MAX_REASON] or "failed"), None
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return ReplicaReady(memory=offer.memory), shared

    def _attach(self, connection: int, offer: ReplicaOffer, descriptor: int) -> int:
        if offer.vocab_size != self._vocab_size or offer.feature_size != self._config.hidden_size:
            raise FailedPreconditionError(
                f"a replica is for {self._vocab_size} ids and features of "
                f"{self._config.hidden_size} values, not {offer.vocab_size} and "
                f"{offer.feature_size}",
                reason="REPLICA",
            )
        rows = offer.num_blocks * offer.block_tokens
        if (
            offer.num_slots - 1 > self._max_sessions
            or rows > self._max_kv_rows
            or offer.table_blocks > offer.num_blocks
        ):
            raise FailedPreconditionError(
                f"a replica has at most {self._max_sessions} sessions and {self._max_kv_rows} K/V "
                f"rows (max_sessions, exchange_kv_rows), not {offer.num_slots - 1} and {rows}",
                reason="REPLICA",
            )
        shape = ExchangeShape(
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
        on_device = offer.memory is MemoryKind.DEVICE
        drafts = map_memory(
            descriptor, shape.draft_layout().num_bytes, self._device, on_device=on_device
        )
        memory: list[SharedMemory] = [drafts]
        try:
            verdicts = allocate_memory(
                shape.verdict_layout().num_bytes, self._device, on_device=on_device
            )
            memory.append(verdicts)
            replica = self._new_replica(offer, shape)
            shared = verdicts.make_descriptor()
        except BaseException:
            for each in memory:
                each.close()
            raise
        replica.attach(verdicts, drafts)
        self._replicas[connection] = replica
        return shared

    def _new_replica(self, offer: ReplicaOffer, shape: ExchangeShape) -> DraftReplica:
        config = self._config
        replica = DraftReplica(
            lambda storage, rows: HeadForward(
                self._weights, storage=storage, block_tokens=offer.block_tokens, max_len=rows
            ),
            (1, config.num_kv_heads, config.head_dim),
            shape,
            ReplicaSlots(offer.num_blocks, offer.block_tokens, offer.table_blocks),
            vocab_size=self._vocab_size,
            dtype=self._dtype,
            device=self._device,
            cuda_graphs=self._cuda_graphs,
        )
        if self._device.type == "cuda" and self._cuda_graphs:
            began = time.monotonic()
            replica.warm_up()
            seconds = round(time.monotonic() - began, 1)
            facts = {"graphs": len(replica.graphs), "seconds": seconds}
            logger.info("replica captured", extra=facts)
        return replica

    def handle_command(self, connection: int, command: ReplicaCommand) -> bool:
        """Do what a verifier says of its replica; whether there is one and it goes on. Raises
        InvalidMessageError for what it cannot do."""
        replica = self._replicas.get(connection)
        if replica is None:
            return True
        with torch.cuda.stream(self._stream(connection)):
            match command:
                case ReplicaRoundLaunched(rows=rows, chunks=chunks, is_sampled=sampled):
                    replica.launch_round(ReplicaRound(rows, chunks, sampled, command.is_ahead))
                case ReplicaSessionBegin():
                    replica.begin_session(
                        command.slot, command.blocks, command.sampling, num_rows=command.num_rows
                    )
                case ReplicaBlocksAdded():
                    replica.add_blocks(command.slot, command.first, command.blocks)
                case ReplicaSessionEnd(slot=slot):
                    replica.end_session(slot)
                case ReplicaOffer():
                    raise InvalidMessageError("there is a replica already", reason="REPLICA")
        return replica.is_open

    def close(self, connection: int) -> None:
        """A connection is gone, or its replica does not go on. Idempotent."""
        replica = self._replicas.pop(connection, None)
        if replica is not None:
            replica.detach()
        self._streams.pop(connection, None)

    def _stream(self, connection: int) -> torch.cuda.Stream | None:
        """What a verifier's graphs wait on holds up no other verifier's."""
        if self._device.type != "cuda":
            return None
        if connection not in self._streams:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._streams[connection] = stream
        return self._streams[connection]


def _torch_dtype(dtype: TensorDtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found
