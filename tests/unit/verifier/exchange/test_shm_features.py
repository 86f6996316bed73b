"""Features that the device left in a lane's memory are sent from there, each row's with its row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_bench.host import scripted_verifier
from outrider_bench.host.fake_device import Steps
from outrider_bench.host.scripted_verifier import LENGTH, VerifierSide
from outrider_verifier.exchange.feature_store import FeatureStore
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.shm_features import ShmFeatures
from outrider_verifier.exchange.verdict_builder import VerdictBatch, VerdictBuilder
from outrider_verifier.state.commands import ExchangeLink
from outrider_verifier.state.session import Session

from outrider.engine.device.transfer.buffers import Downloader
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import chain_parents
from outrider.transport.shm import ShmChannel, is_ring_view, make_channel_pair
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import FeatureLayout, Proposals, TensorDtype, Verdicts
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import DRAFTER, make_spec

SESSIONS, WIDTH = 16, 4096


def told_by(shm_channel: ShmChannel) -> list[Verdicts]:
    frames = shm_channel.receive_views()
    messages = [each for frame in frames for each in decode_verifier_messages(frame)]
    return [message for message in messages if isinstance(message, Verdicts)]


def rows_told(verdicts: list[Verdicts]) -> dict[int, list[list[int]]]:
    """Of each handle the first two values of every row of its features."""
    return {
        entry.handle: entry.features.data[:, :2].tolist()
        for message in verdicts
        for entry in message.iter_verdicts()
        if entry.features is not None
    }


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canned features say which row of their launch they are, in bits."""
    canned: Callable[..., Any] = scripted_verifier._verified

    def verified(shape: Any, width: int) -> Any:
        found = canned(shape, width)
        if found.features is None:
            return found
        rows = torch.arange(len(found.features), dtype=torch.int16)[:, None]
        return found._replace(features=rows.expand(-1, width).contiguous().view(torch.bfloat16))

    monkeypatch.setattr(scripted_verifier, "_verified", verified)


def proposals_for(told: Verdicts) -> bytes:
    """A chain for each prefix."""
    counts = np.full(len(told), LENGTH)
    nodes = LENGTH * len(told)
    proposals = Proposals(
        handles=told.handles,
        digests=told.digests,
        prefix_lens=told.starts + told.token_counts,
        node_counts=counts,
        tokens=np.full(nodes, 5, dtype=np.int32),
        parents=chain_parents(counts),
        logprobs=np.zeros(nodes, dtype=np.float32),
        distributions=None,
        draft_us=1,
    )
    return encode_drafter_message(proposals)


class Round(NamedTuple):
    """A round that verified chains."""

    told: list[Verdicts]
    memory: NDArray[np.generic]
    """Where the drafter finds the features."""
    kept: list[list[list[int]]]
    """Of each session, what the verifier keeps of every row of them."""


def verified_round(*, places: bool, stranger: bool = False) -> Round:
    """What a drafter hears of a round; `stranger`: in which the prompt of a session without a
    drafter is read."""
    ours, theirs = make_channel_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(
            SESSIONS + 1, Steps(), planner="fixed", width=WIDTH, shm_channel=ours
        )
        runner: Any = verifier.service.core.runner
        runner.rounds.downloads = Downloader(torch.device("cpu"))
        if not places:
            ours.allow_reservations(lambda memory: False)
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=LENGTH, proposal_timeout_ms=60_000
        )
        verifier.open(SESSIONS, 40, plan)
        *_, prompts = told_by(theirs)
        assert len(prompts) == SESSIONS
        verifier.offer([proposals_for(prompts)])
        if stranger:
            verifier.open_one(SESSIONS, 40, 40, SpeculationPlan(), drafted=False)
        verifier.round()
        told = told_by(theirs)
        store = verifier.service.core.store
        assert told[-1].features is not None and store is not None
        sessions = list(verifier.service.core.sessions.values())[:SESSIONS]
        kept = [
            [row[:2].tolist() for piece in pieces for row in piece]
            for pieces in (store.read(s.handle, 0, store.num_held(s.handle)) for s in sessions)
        ]
        return Round(told, told[-1].features.joined(), kept)


@pytest.mark.usefixtures("numbered")
def test_a_round_is_told_from_where_it_came_down_and_as_before() -> None:
    placed, memory, kept = verified_round(places=True)
    copied, packed, before = verified_round(places=False)
    assert kept == before and all(len(rows) > LENGTH for rows in kept)
    assert placed[-1].feature_offsets is not None and copied[-1].feature_offsets is None
    assert is_ring_view(memory) and memory.nbytes > 0
    assert memory.flags.aligned
    found = rows_told(placed)
    assert found == rows_told(copied) and len(found) == SESSIONS
    # All tokens of a draft but the last one stand; between them lies what does not.
    nodes = LENGTH + 1
    firsts = sorted(rows[0][0] for rows in found.values())
    assert firsts == list(range(0, SESSIONS * nodes, nodes))
    assert all(len(rows) == LENGTH for rows in found.values())
    assert len(memory) == SESSIONS * nodes - 1 and len(packed) == SESSIONS * LENGTH


@pytest.mark.usefixtures("numbered")
def test_a_drafter_finds_nothing_of_a_session_that_is_not_its_own() -> None:
    beside = verified_round(places=True, stranger=True)
    assert beside.told[-1].feature_offsets is None
    assert len(beside.memory) == SESSIONS * LENGTH
    assert rows_told(beside.told) == rows_told(verified_round(places=False).told)


def test_what_was_put_for_another_drafter_is_copied_out_of_there() -> None:
    store = FeatureStore(width=2, dtype=np.uint16, budget_bytes=1 << 16, max_sessions=4)
    verdict_builder = VerdictBuilder(
        inbox=ProposalInbox(max_sessions=4, per_session=2, reach=4, budget_bytes=1 << 16),
        store=store,
        dtype=TensorDtype.BFLOAT16,
        chunk_tokens=8,
        max_sessions=4,
    )
    session = Session.create(
        make_spec(prompt=(5, 6)),
        ticket=1,
        kv=FakeTarget(num_blocks=8).pool.allocate(8),
        now=0.0,
        keeps_features=True,
    )
    session.handle = 2
    verdict_builder.follow_session(session)
    link = ExchangeLink(
        link_id=7,
        drafter_id=DRAFTER,
        incarnation="1",
        methods=(DraftMethod.EAGLE3,),
        feature_layout=FeatureLayout.PROJECTED,
    )
    assert len(list(verdict_builder.start_session(session, link))) == 1
    memory = np.arange(20, dtype=np.uint16).reshape(10, 2)
    for link_id, offsets, rows in ((7, [3], 5), (8, None, 2)):
        told = VerdictBatch.of_current([session], [None])
        told.features = ShmFeatures(link_id, memory, np.array([3]), np.array([2]))
        ((link, verdicts),) = verdict_builder.build_verdicts(verdict_builder.advance_prefixes(told))
        assert link == 7 and verdicts.features is not None
        found = verdicts.feature_offsets
        assert (None if found is None else found.tolist()) == offsets
        assert len(verdicts.features.joined()) == rows
        (entry,) = verdicts.iter_verdicts()
        assert entry.features is not None and entry.features.data.tolist() == memory[3:5].tolist()


def test_rows_without_features_have_none_wherever_they_lie() -> None:
    memory = np.arange(20, dtype=np.uint16).reshape(10, 2)
    placed = ShmFeatures(1, memory, np.array([0, 3, 6]), np.array([2, 0, 3]))
    first, none, last = placed.row_slices()
    assert none is None and first is not None and last is not None
    assert first.tolist() == memory[:2].tolist() and last.tolist() == memory[6:9].tolist()
    chosen = placed.select(np.array([False, True, True])).row_slices()
    assert chosen[0] is None and chosen[1] is not None and chosen[1].tolist() == last.tolist()
