"""Manages the exchange of drafts and features with a drafter on another device of this host. Used
on the engine thread only.

The verifier offers memory of its device to the first drafter of this host that attaches. If the
drafter answers with memory of its own device, the sessions of this drafter exchange drafts and
features directly between the devices. When the drafter is lost, the next drafter gets an offer.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from outrider import timeline
from outrider.engine.device.current_device import gpu_uuid
from outrider.engine.device.exchange.device_clock import DeviceClock
from outrider.engine.device.exchange.draft_replica import ReplicaRound
from outrider.engine.device.exchange.exchange_times import ExchangedRound
from outrider.engine.device.exchange.memory import SharedMemory, allocate_memory, map_memory
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.exchange.round_history import READ_EVERY_S
from outrider.engine.device.exchange.round_spans import VERIFIER_STEPS, RoundSpans
from outrider.engine.logits_processor import TokenHistory
from outrider.errors import InvalidMessageError, OutriderError, UnavailableError
from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import (
    DeviceExchangeInfo,
    MemoryKind,
    ReplicaAnswer,
    ReplicaBlocksAdded,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    ReplicaSessionEnd,
    SessionSpec,
    TensorDtype,
)
from outrider_verifier.state.commands import ExchangeLink

logger = logging.getLogger(__name__)
_ROUNDS: Final = 512
"""Number of newest rounds with the same number of rows over which the medians are computed, and
number of newest rounds whose idle time `info` contains."""
_INFO_S: Final = 1.0
"""Interval at which the idle time in `info` is computed, in seconds."""

_COUNTERS: Final = (
    "device_exchange_rounds",
    "device_exchange_late_rounds",
    "device_exchange_hits",
)
ANSWER_TIMEOUT_S: Final = 120.0
"""Maximum time that a drafter may take to answer an offer, in seconds. It is long because the
drafter first captures its CUDA graphs and may have to compile their kernels."""


class ReplicaChannels(Protocol):
    """Sends messages and file descriptors over the shared-memory channels to drafters. Link ids and
    channel numbers are the same numbers."""

    def send_messages(self, link_id: int, messages: Sequence[ReplicaCommand]) -> None:
        """Send several messages to a drafter over the channel of its link."""

    def send_descriptor(self, number: int, descriptor: int) -> None:
        """Send a file descriptor over a channel."""

    def take_descriptor(self, number: int) -> int | None:
        """Return the file descriptor that was last received over a channel, or None if there is
        none. The caller must close it."""
        ...

    def drop_channel(self, number: int, why: str) -> None:
        """Close a channel and the connection of its drafter. `why` is the reason, for the log."""


class _Host:
    """Sends the commands of a replica's host to the drafter by its channel; see `ReplicaHost`."""

    def __init__(self, send: Callable[[ReplicaCommand], None]) -> None:
        self._send = send

    def begin_session(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: SamplingParams,
        *,
        num_rows: int,
        history: TokenHistory,
    ) -> None:
        self._send(
            ReplicaSessionBegin(
                slot=slot,
                blocks=tuple(blocks),
                sampling=sampling,
                num_rows=num_rows,
                prompt_ids=tuple(history.prompt_ids.tolist()),
                output_ids=tuple(history.output_ids.tolist()),
            )
        )

    def add_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        self._send(ReplicaBlocksAdded(slot=slot, first=first, blocks=tuple(blocks)))

    def end_session(self, slot: int) -> None:
        self._send(ReplicaSessionEnd(slot=slot))

    def launch_round(self, announced: ReplicaRound) -> None:
        self._send(ReplicaRoundLaunched(**announced._asdict()))


class DeviceExchange:
    """Manages the exchange of drafts and features between devices. At any time it is open with at
    most one drafter."""

    def __init__(
        self,
        remote: RemoteDrafter,
        channels: ReplicaChannels,
        *,
        num_blocks: int,
        block_tokens: int,
        table_blocks: int,
        feature_dtype: TensorDtype,
        on_open: Callable[[], None],
        on_lost: Callable[[], None],
        on_drafts: Callable[[DrafterId, int], None],
        on_rounds: Callable[[Sequence[ExchangedRound]], None],
    ) -> None:
        """Create an exchange that is not open. `num_blocks` and `block_tokens` describe the KV
        pool; `table_blocks` is the number of blocks in a session's block table.

        `on_open` is called when the exchange has opened, and `on_lost` when an open exchange was
        lost. `on_drafts` gets a drafter's id and the number of rounds that found drafts of this
        drafter. `on_rounds` gets the times of these rounds.
        """
        self._remote, self._channels = remote, channels
        self._pool = (num_blocks, block_tokens, table_blocks)
        self._feature_dtype = feature_dtype
        self._on_open, self._on_lost = on_open, on_lost
        self._on_drafts, self._on_rounds = on_drafts, on_rounds
        self._closed = DeviceExchangeInfo(draft_length=remote.exchange_shape.draft_length)
        self.info = self._closed
        """State of the exchange. It is replaced as a whole, so any thread may read it."""
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        """Counters of rounds since the start. They omit rounds whose times were overwritten on the
        device before they were read."""
        self._link: ExchangeLink | None = None
        """Link of the drafter that got the offer or has accepted it; None if there is none."""
        self._waiting: dict[int, ExchangeLink] = {}
        """Links of the drafters that may get the next offers, by link id."""
        self._memory: SharedMemory | None = None
        """Memory that was offered, until the answer arrives."""
        self._times: dict[int, deque[ExchangedRound]] = {}
        """The newest rounds, by number of rows."""
        self._newest: deque[ExchangedRound] = deque(maxlen=_ROUNDS)
        """The newest rounds of the open exchange."""
        self._look_again = 0.0
        self._tell_again = 0.0
        self._offered_at = 0.0
        self._clock: DeviceClock | None = None
        if timeline.is_recording():
            self._clock = DeviceClock(remote.device)
            remote.times.spans = RoundSpans(
                self._clock,
                VERIFIER_STEPS,
                partial(timeline.mark_span, track="device exchange"),
            )
        on_device = remote.device.type == "cuda"
        self._first_kind = MemoryKind.DEVICE if on_device else MemoryKind.HOST
        self._kind = self._first_kind
        """Kind of memory that is offered. It is host memory once the devices were found not to
        reach each other."""

    @property
    def drafter_id(self) -> DrafterId | None:
        """Id of the drafter with which the exchange is open; None if it is not open."""
        return self._link.drafter_id if self._link and self._remote.is_attached else None

    def draft_length(self, spec: SessionSpec) -> int:
        """Return the length of the drafts that a new session gets by this exchange, in tokens; 0 if
        it gets none. Sessions with a grammar, token limits or a thinking budget exchange drafts by
        messages."""
        if spec.drafter_id is None or spec.drafter_id != self.drafter_id:
            return 0
        parts = (spec.structured_output, spec.token_limits, spec.thinking_budget)
        if any(part is not None for part in parts):
            return 0
        return self._remote.exchange_shape.draft_length

    def add_drafter(self, link: ExchangeLink) -> None:
        """Add a drafter that has attached and has a shared-memory channel."""
        if DraftMethod.EAGLE3 not in link.methods:
            return
        self._waiting[link.link_id] = link
        self._offer_next()

    def remove_drafter(self, link_id: int) -> None:
        """Remove a drafter that has disconnected. Does nothing if it was removed before."""
        self._waiting.pop(link_id, None)
        if self._link is None or self._link.link_id != link_id:
            return
        was_open = self._remote.is_attached
        if was_open:
            # Read the times of its rounds now, because they are lost with the drafter.
            self._read_times()
        self._link, self.info = None, self._closed
        self._newest.clear()
        self._close_memory()
        if was_open:
            logger.warning("the exchange between devices is lost", extra={"link": link_id})
            self._on_lost()
        self._offer_next()

    def take_answer(self, link_id: int, answer: ReplicaAnswer) -> None:
        """Handle a drafter's answer to an offer. An invalid answer closes the drafter's channel."""
        descriptor = self._channels.take_descriptor(link_id)
        link, own = self._link, self._memory
        try:
            if link is None or link.link_id != link_id or own is None:
                raise InvalidMessageError("no replica was offered", reason="REPLICA")
            if not isinstance(answer, ReplicaReady):
                self._take_refusal(link, answer.reason)
                return
            if descriptor is None:
                raise InvalidMessageError("the answer came without memory", reason="REPLICA")
            if answer.memory is not self._kind:
                raise InvalidMessageError("the answer is for other memory", reason="REPLICA")
            size = self._remote.exchange_shape.verdict_layout().num_bytes
            on_device = self._kind is MemoryKind.DEVICE
            peer = self._map(descriptor, size, on_device=on_device)
            self._memory = None
            self._remote.attach(own, peer, _Host(lambda each: self._tell(link_id, each)))
            self.info = replace(self._closed, drafter_id=link.drafter_id, memory=answer.memory)
            if self._clock is not None:
                self._clock.measure()
            logger.info(
                "exchanging between devices",
                extra={"drafter_id": link.drafter_id, "memory": str(answer.memory)},
            )
            self._on_open()
        except OutriderError as error:
            self._channels.drop_channel(link_id, error.message)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _map(self, descriptor: int, size: int, *, on_device: bool) -> SharedMemory:
        try:
            return map_memory(descriptor, size, self._remote.device, on_device=on_device)
        except UnavailableError:
            # The drafter connects again and is then offered host memory, which works everywhere.
            self._kind = MemoryKind.HOST
            raise

    def _take_refusal(self, link: ExchangeLink, reason: str) -> None:
        """Offer host memory to a drafter that refused device memory, because its device may not
        reach this one. If the drafter refuses host memory too, offer device memory to the next
        drafter."""
        logger.info("no replica", extra={"link": link.link_id, "reason": reason})
        self._close_memory()
        self._link = None
        if self._kind is MemoryKind.DEVICE:
            self._kind = MemoryKind.HOST
            self._offer(link)
        else:
            self._kind = self._first_kind
            self._offer_next()

    def check(self) -> None:
        """Disconnect a drafter that has missed a round or does not answer its offer, and read the
        times of rounds. Call this regularly."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + READ_EVERY_S
            self._read_times()
            if now >= self._tell_again and self._newest and self.info.drafter_id is not None:
                self._tell_again = now + _INFO_S
                self.info = _with_idle_time(self.info, self._newest)
        if self._link is None:
            return
        if self._remote.is_attached:
            if not self._remote.is_open:
                self._channels.drop_channel(self._link.link_id, "the drafter has missed a round")
        elif now - self._offered_at > ANSWER_TIMEOUT_S:
            self._channels.drop_channel(self._link.link_id, "the drafter does not answer an offer")

    def _read_times(self) -> None:
        times, drafter_id = self._remote.times, self.drafter_id
        before = times.answered
        rounds = list(times.take_rounds())
        for each in rounds:
            self._times.setdefault(each.rows, deque(maxlen=_ROUNDS)).append(each)
        self._newest.extend(rounds)
        self._on_rounds(rounds)
        for name, count in zip(_COUNTERS, (times.answered, times.late, times.hits), strict=True):
            self.counters[name] = count
        if drafter_id is not None and times.answered > before:
            self._on_drafts(drafter_id, times.answered - before)

    def close(self) -> None:
        """Close the exchange for good: no further drafter gets an offer."""
        self._waiting.clear()
        for rows, rounds in sorted(self._times.items()):
            logger.info("idle time of rounds", extra={"rows": rows, **_medians(rounds)})
        if self._link is not None:
            self.remove_drafter(self._link.link_id)

    def _tell(self, link_id: int, command: ReplicaCommand) -> None:
        self._channels.send_messages(link_id, [command])

    def _offer_next(self) -> None:
        if self._link is not None or not self._waiting:
            return
        link_id, link = next(iter(self._waiting.items()))
        del self._waiting[link_id]
        self._offer(link)

    def _offer(self, link: ExchangeLink) -> None:
        link_id, shape, device = link.link_id, self._remote.exchange_shape, self._remote.device
        on_device = self._kind is MemoryKind.DEVICE
        try:
            memory = allocate_memory(shape.draft_layout().num_bytes, device, on_device=on_device)
        except OutriderError as error:
            logger.warning("no exchange between devices", extra={"reason": error.message})
            return
        self._link, self._memory, self._offered_at = link, memory, time.monotonic()
        descriptor = memory.make_descriptor()
        self._channels.send_descriptor(link_id, descriptor)
        os.close(descriptor)
        num_blocks, block_tokens, table_blocks = self._pool
        self._tell(
            link_id,
            ReplicaOffer(
                num_slots=shape.num_slots,
                max_rows=shape.max_rows,
                draft_length=shape.draft_length,
                max_chunks=shape.max_chunks,
                chunk_tokens=shape.chunk_tokens,
                feature_size=shape.feature_size,
                feature_dtype=self._feature_dtype,
                distribution_entries=shape.distribution_entries,
                depth=shape.depth,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                table_blocks=table_blocks,
                vocab_size=self._remote.vocab_size,
                memory=self._kind,
                fan_out=shape.fan_out,
                ahead_rows=shape.ahead_rows,
                gpu=gpu_uuid(device),
            ),
        )

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _with_idle_time(
    info: DeviceExchangeInfo, rounds: Sequence[ExchangedRound]
) -> DeviceExchangeInfo:
    """Return `info` with the median idle time of the rounds with the most frequent number of
    rows."""
    ((rows, _),) = Counter(each.rows for each in rounds).most_common(1)
    idle_s = statistics.median(each.idle_s for each in rounds if each.rows == rows)
    return replace(info, idle_us_p50=round(idle_s * 1e6, 1), idle_rows=rows)


def _medians(rounds: Sequence[ExchangedRound]) -> dict[str, float]:
    """Return the medians in microseconds, the number of rounds, and the share of session rows whose
    draft had been made ahead."""
    named = {
        "idle_us": [each.idle_s for each in rounds],
        "drafting_us": [each.drafting_s for each in rounds],
        "waited_us": [each.waited_s for each in rounds],
    }
    medians = {name: round(statistics.median(values) * 1e6, 1) for name, values in named.items()}
    hit_rate = sum(each.hits for each in rounds) / sum(each.rows for each in rounds)
    return {"rounds": len(rounds), **medians, "hit_rate": round(hit_rate, 3)}
