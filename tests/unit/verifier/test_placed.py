"""Features that the device left in a lane's memory are sent from there, each row's with its row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_bench import host_verifier
from outrider_bench.host_canned import Steps
from outrider_bench.host_verifier import LENGTH, VerifierSide
from outrider_verifier.placed import Placed

from outrider.engine.device.buffers import Downloader
from outrider.spec.flat_trees import chain_parents
from outrider.spec.plan import DraftMethod, Plan
from outrider.transport.lane import Lane, is_lent, lane_pair
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import Proposals, Verdicts

SESSIONS, WIDTH = 16, 4096


def told_by(lane: Lane) -> list[Verdicts]:
    frames = lane.borrow()
    messages = [each for frame in frames for each in decode_verifier_messages(frame)]
    return [message for message in messages if isinstance(message, Verdicts)]


def rows_told(verdicts: list[Verdicts]) -> dict[int, list[list[int]]]:
    """Of each handle the first two values of every row of its features."""
    return {
        entry.handle: entry.features.data[:, :2].tolist()
        for message in verdicts
        for entry in message.entries()
        if entry.features is not None
    }


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canned features say which row of their launch they are, in bits."""
    canned: Callable[..., Any] = host_verifier._verified

    def verified(shape: Any, width: int) -> Any:
        found = canned(shape, width)
        if found.features is None:
            return found
        rows = torch.arange(len(found.features), dtype=torch.int16)[:, None]
        return found._replace(features=rows.expand(-1, width).contiguous().view(torch.bfloat16))

    monkeypatch.setattr(host_verifier, "_verified", verified)


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
        laws=None,
        draft_us=1,
    )
    return encode_drafter_message(proposals)


def verified_round(*, places: bool) -> tuple[list[Verdicts], NDArray[np.generic]]:
    """What a drafter hears of a round that verified chains, and where the features lie."""
    ours, theirs = lane_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(SESSIONS, Steps(), planner="fixed", width=WIDTH, lane=ours)
        runner: Any = verifier.service._rounds._engine
        runner.rounds._downloads = Downloader(torch.device("cpu"))
        if not places:
            ours.open_for(lambda memory: False)
        plan = Plan(method=DraftMethod.EAGLE3, draft_tokens=LENGTH, patience_ms=60_000)
        verifier.open(SESSIONS, 40, plan)
        *_, prompts = told_by(theirs)
        assert len(prompts) == SESSIONS
        verifier.offer([proposals_for(prompts)])
        verifier.round()
        told = told_by(theirs)
        assert told[-1].features is not None
        return told, told[-1].features.joined()


@pytest.mark.usefixtures("numbered")
def test_a_round_is_told_from_where_it_came_down_and_as_before() -> None:
    placed, memory = verified_round(places=True)
    copied, packed = verified_round(places=False)
    assert placed[-1].feature_offsets is not None and copied[-1].feature_offsets is None
    assert is_lent(memory) and memory.nbytes > 0
    assert memory.flags.aligned
    found = rows_told(placed)
    assert found == rows_told(copied) and len(found) == SESSIONS
    # All tokens of a draft but the last one stand; between them lies what does not.
    nodes = LENGTH + 1
    firsts = sorted(rows[0][0] for rows in found.values())
    assert firsts == list(range(0, SESSIONS * nodes, nodes))
    assert all(len(rows) == LENGTH for rows in found.values())
    assert len(memory) == SESSIONS * nodes - 1 and len(packed) == SESSIONS * LENGTH


def test_rows_without_features_have_none_wherever_they_lie() -> None:
    memory = np.arange(20, dtype=np.uint16).reshape(10, 2)
    placed = Placed(memory, np.array([0, 3, 6]), np.array([2, 0, 3]))
    first, none, last = placed.pieces()
    assert none is None and first is not None and last is not None
    assert first.tolist() == memory[:2].tolist() and last.tolist() == memory[6:9].tolist()
    chosen = placed.only(np.array([False, True, True])).pieces()
    assert chosen[0] is None and chosen[1] is not None and chosen[1].tolist() == last.tolist()
