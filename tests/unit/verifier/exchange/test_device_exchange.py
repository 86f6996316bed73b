"""Whom a verifier exchanges with between devices: one drafter at a time, the next one when it is
lost, and nobody who answers wrongly."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from outrider_verifier.exchange import device_exchange as module
from outrider_verifier.exchange.device_exchange import DeviceExchange
from outrider_verifier.state.commands import ExchangeLink

from outrider.engine.device.exchange.exchange_times import ExchangedRound
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import allocate_on_host
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape
from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import SamplingParams
from outrider.timeline import record_timeline
from outrider.wire.messages import (
    DeviceExchangeInfo,
    FeatureLayout,
    MemoryKind,
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
from tests.unit.verifier.harness import make_spec

CPU = torch.device("cpu")
SHAPE = ExchangeShape(
    num_slots=5,
    max_rows=4,
    draft_length=3,
    max_chunks=2,
    chunk_tokens=8,
    feature_size=6,
    feature_dtype=torch.float32,
    distribution_entries=0,
)
READY = ReplicaReady(memory=MemoryKind.HOST)


def link(number: int, *methods: DraftMethod) -> ExchangeLink:
    """A drafter that has attached."""
    return ExchangeLink(
        link_id=number,
        drafter_id=DrafterId(f"d{number}"),
        incarnation="x",
        methods=methods or (DraftMethod.EAGLE3,),
        feature_layout=FeatureLayout.NONE,
        same_host=True,
    )


@dataclass
class Channels:
    """Shared-memory channels without peers."""

    sent: list[tuple[int, ReplicaCommand]] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    """To whom descriptors were passed."""
    came: int | None = None
    dropped: list[int] = field(default_factory=list)

    def send_messages(self, link_id: int, messages: Sequence[ReplicaCommand]) -> None:
        self.sent += [(link_id, message) for message in messages]

    def send_descriptor(self, number: int, descriptor: int) -> None:
        os.fstat(descriptor)
        self.passed.append(number)

    def take_descriptor(self, number: int) -> int | None:
        came, self.came = self.came, None
        return came

    def drop_channel(self, number: int, why: str) -> None:
        self.dropped.append(number)


class Rig:
    """An exchange, and what became of it."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.channels = Channels()
        self.remote = RemoteDrafter(SHAPE, vocab_size=50, device=CPU, timeout_us=1000)
        self.remote.device = device
        self.opened = 0
        self.lost = 0
        self.answers: list[tuple[str, int]] = []
        self.rounds: list[ExchangedRound] = []
        self.exchange = DeviceExchange(
            self.remote,
            self.channels,
            num_blocks=64,
            block_tokens=16,
            table_blocks=32,
            feature_dtype=TensorDtype.FLOAT32,
            on_open=self._open,
            on_lost=self._lose,
            on_drafts=lambda drafter_id, rounds: self.answers.append((drafter_id, rounds)),
            on_rounds=self.rounds.extend,
        )

    def _open(self) -> None:
        self.opened += 1

    def _lose(self) -> None:
        self.lost += 1
        self.remote.detach()

    def answer_ready(self, number: int, *, size: int = SHAPE.verdict_layout().num_bytes) -> None:
        """A drafter answers with memory of its own."""
        memory = allocate_on_host(size, CPU)
        self.channels.came = memory.make_descriptor()
        self.exchange.take_answer(number, READY)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_first_drafter_is_offered_memory_and_told_of_rounds(rig: Rig) -> None:
    rig.exchange.add_drafter(link(1, DraftMethod.NGRAM))
    assert rig.channels.sent == []
    rig.exchange.add_drafter(link(2))
    rig.exchange.add_drafter(link(3))
    ((to, offer),) = rig.channels.sent
    assert (to, rig.channels.passed) == (2, [2])
    assert isinstance(offer, ReplicaOffer)
    assert (offer.num_slots, offer.num_blocks, offer.memory) == (5, 64, MemoryKind.HOST)
    assert rig.exchange.drafter_id is None
    rig.answer_ready(2)
    assert (rig.opened, rig.exchange.drafter_id) == (1, DrafterId("d2"))
    rig.channels.sent.clear()
    rig.remote.begin_session(1, [7, 8], SamplingParams(), num_rows=0, digest=2**64 - 1)
    rig.remote.add_blocks(1, 2, [9])
    rig.remote.add_blocks(3, 0, [10])
    rig.remote.announce_round(
        RoundShape(
            rows=2,
            nodes=4,
            draft_kind=DraftKind.IN_PROCESS,
            acceptance_mode=AcceptanceMode.SAMPLED,
            has_features=True,
            chunks=1,
        ),
        rejection=True,
    )
    rig.remote.end_session(1)
    rig.remote.end_session(1)
    assert [message for _, message in rig.channels.sent] == [
        ReplicaSessionBegin(slot=1, blocks=(7, 8), sampling=SamplingParams(), num_rows=0),
        # The session in slot 3 is none of its own.
        ReplicaBlocksAdded(slot=1, first=2, blocks=(9,)),
        ReplicaRoundLaunched(rows=3, chunks=1, is_sampled=True, has_rejection=True),
        ReplicaSessionEnd(slot=1),
    ]


def test_when_a_drafter_is_lost_the_next_one_is_made_an_offer(rig: Rig) -> None:
    for number in (1, 2):
        rig.exchange.add_drafter(link(number))
    rig.answer_ready(1)
    rig.exchange.remove_drafter(2)
    rig.exchange.add_drafter(link(3))
    rig.exchange.remove_drafter(1)
    assert (rig.lost, rig.channels.passed) == (1, [1, 3])
    rig.answer_ready(3)
    assert rig.exchange.drafter_id == DrafterId("d3")
    rig.exchange.close()
    assert rig.lost == 2 and rig.exchange.drafter_id is None


def test_a_drafter_that_refuses_is_asked_no_more(rig: Rig) -> None:
    for number in (1, 2):
        rig.exchange.add_drafter(link(number))
    rig.exchange.take_answer(1, ReplicaRefused(reason="no memory"))
    assert rig.channels.passed == [1, 2]
    rig.exchange.take_answer(2, ReplicaRefused(reason="no memory"))
    assert (rig.channels.passed, rig.opened, rig.lost) == ([1, 2], 0, 0)


def test_wrong_answers_end_their_connections(rig: Rig) -> None:
    rig.exchange.take_answer(9, READY)
    rig.exchange.add_drafter(link(1))
    rig.answer_ready(9)
    rig.exchange.take_answer(1, READY)
    rig.answer_ready(1, size=4096)
    rig.exchange.take_answer(1, ReplicaReady(memory=MemoryKind.DEVICE))
    assert rig.channels.dropped == [9, 9, 1, 1, 1]
    assert rig.opened == 0 and rig.exchange.drafter_id is None
    # The offer stands until the connection is gone.
    rig.exchange.remove_drafter(1)
    assert rig.lost == 0


def test_a_drafter_that_has_missed_a_round_is_given_up(rig: Rig) -> None:
    rig.exchange.check()
    rig.exchange.add_drafter(link(1))
    rig.answer_ready(1)
    rig.exchange.check()
    assert rig.channels.dropped == []
    rig.remote.state.host_control[2] = 0
    rig.exchange.check()
    assert rig.channels.dropped == [1]


def test_a_drafter_that_does_not_answer_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.exchange.add_drafter(link(1))
    rig.exchange.check()
    assert rig.channels.dropped == []
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", -1.0)
    rig.exchange.check()
    assert rig.channels.dropped == [1]


def test_a_drafter_without_room_leaves_memory_of_the_device_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        module, "allocate_memory", lambda size, *_, **__: allocate_on_host(size, CPU)
    )
    monkeypatch.setattr(module, "gpu_uuid", lambda device: "gpu-1")
    rig = Rig(device=torch.device("cuda"))
    for number in (1, 2):
        rig.exchange.add_drafter(link(number))
    for _ in range(2):
        rig.exchange.take_answer(1, ReplicaRefused(reason="no room"))
    offers = [(to, each.memory) for to, each in rig.channels.sent if isinstance(each, ReplicaOffer)]
    assert offers == [(1, MemoryKind.DEVICE), (1, MemoryKind.HOST), (2, MemoryKind.DEVICE)]


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({}, 3),
        ({"drafter_id": DrafterId("d2")}, 0),
        ({"drafter_id": None}, 0),
        ({"sampling": SamplingParams(temperature=0.8, top_p=0.9, seed=1)}, 3),
        ({"sampling": SamplingParams(presence_penalty=1.0)}, 3),
    ],
)
def test_which_sessions_draft_between_devices(
    rig: Rig, change: dict[str, object], length: int
) -> None:
    spec = replace(make_spec("s"), **{"drafter_id": DrafterId("d1"), **change})
    assert rig.exchange.draft_length(spec) == 0
    rig.exchange.add_drafter(link(1))
    assert rig.exchange.draft_length(spec) == 0
    rig.answer_ready(1)
    assert rig.exchange.draft_length(spec) == length


def test_rounds_that_found_drafts_count_as_answers(rig: Rig) -> None:
    rig.exchange.add_drafter(link(2))
    rig.answer_ready(2)
    history = rig.remote.state.history
    for number, drafting in ((1, 0), (2, 900_000), (3, 900_000)):
        history[number] = torch.tensor([number, 0, 0, 0, 0, drafting, 0, 0, 1, number])
    rig.exchange.check()
    assert rig.answers == [("d2", 2)]
    assert rig.exchange.counters == {
        "device_exchange_rounds": 2,
        "device_exchange_late_rounds": 1,
        "device_exchange_hits": 0,
    }


def put_round(rig: Rig, number: int, *, rows: int, idle_us: int) -> None:
    """Write a round as the device does, 5 ms behind the one before it."""
    begun = number * 5_000_000
    accepted_before = begun - 100_000
    taken = accepted_before + 50_000 + idle_us * 1000
    times = [begun, begun, begun, taken, accepted_before + 5_000_000, 50_000, 0, 0, rows, number]
    rig.remote.state.history[number] = torch.tensor(times)


def test_the_state_of_the_exchange_is_told(rig: Rig) -> None:
    assert rig.exchange.info == DeviceExchangeInfo(draft_length=3)
    rig.exchange.add_drafter(link(2))
    assert rig.exchange.info == DeviceExchangeInfo(draft_length=3)
    rig.answer_ready(2)
    open_info = DeviceExchangeInfo(
        drafter_id=DrafterId("d2"), memory=MemoryKind.HOST, draft_length=3
    )
    assert rig.exchange.info == open_info
    for number, rows in enumerate((2, 2, 2, 4, 4, 4, 4, 4), 1):
        put_round(rig, number, rows=rows, idle_us=20 + number)
    rig.exchange.check()
    # Rounds 5 to 8 follow one of as many rows.
    assert [each.rows for each in rig.rounds] == [2, 2, 4, 4, 4, 4]
    assert rig.exchange.info == replace(open_info, idle_us_p50=26.5, idle_rows=4)
    put_round(rig, 9, rows=4, idle_us=30)
    rig.exchange.remove_drafter(2)
    assert rig.exchange.info == DeviceExchangeInfo(draft_length=3)
    assert (len(rig.rounds), rig.answers[-1]) == (7, ("d2", 1))


def test_rounds_are_on_the_timeline_where_one_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "verifier.json"
    with record_timeline(path, "verifier"):
        rig = Rig()
        rig.exchange.add_drafter(link(2))
        rig.answer_ready(2)
        put_round(rig, 1, rows=2, idle_us=20)
        rig.exchange.check()
        put_round(rig, 2, rows=2, idle_us=20)
        rig.exchange.close()
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("forward and acceptance") == 2
    assert Rig().remote.times.spans is None
