"""What a round's static inputs hold after the host described its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.engine.device.graphs.shapes import DraftKind
from outrider.engine.device.inputs.distribution_inputs import DistributionInputs
from outrider.engine.device.inputs.round_inputs import NO_TOKEN, RoundInputs
from outrider.engine.device.inputs.round_rows import RoundRow, RoundRows
from outrider.engine.device.transfer.buffers import NUM_STAGING_BUFFERS, Downloader, Uploader
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.spec.tree import DraftTree

CPU = torch.device("cpu")
PADDING = 9


def tree(tokens: Sequence[int], parents: Sequence[int] | None = None) -> DraftTree:
    """A chain unless parents are given."""
    if parents is None:
        parents = range(-1, len(tokens) - 1)
    return DraftTree(
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
    )


def inputs(rows: int = 4, nodes: int = 4) -> RoundInputs:
    return RoundInputs(
        rows, nodes, DistributionInputs(max_rows=1, device=CPU), padding=PADDING, device=CPU
    )


def rows(slots: Sequence[int], trees: Sequence[DraftTree | None]) -> RoundRows:
    """Rows with a draft each, or none."""
    return RoundRows.of_rows([RoundRow(*each) for each in zip(slots, trees, strict=True)])


def test_rows_and_nodes_that_are_not_there_are_padding() -> None:
    given = inputs()
    given.fill_rows(
        rows([3, 1, 2], [tree([5, 6, 7], [-1, -1, 0]), None, tree([8])]), DraftKind.TREE
    )
    assert given.slots.tolist() == [3, 1, 2, PADDING]
    none = [NO_TOKEN] * 3
    assert given.drafts.tolist() == [[5, 6, 7], none, [8, NO_TOKEN, NO_TOKEN], none]
    absent = [PADDING_NODE] * 3
    assert given.parents.tolist() == [
        [-1, -1, 0],
        absent,
        [-1, PADDING_NODE, PADDING_NODE],
        absent,
    ]


def test_nothing_of_an_earlier_round_stays() -> None:
    given = inputs(rows=2)
    for _ in range(NUM_STAGING_BUFFERS):
        given.fill_rows(rows([0, 1], [tree([1, 2, 3]), tree([4, 5, 6])]), DraftKind.TREE)
    given.fill_rows(rows([7], [tree([9])]), DraftKind.CHAIN)
    assert given.slots.tolist() == [7, PADDING]
    assert given.drafts.tolist() == [[9, NO_TOKEN, NO_TOKEN], [NO_TOKEN] * 3]
    given.fill_rows(rows([7], [tree([9])]), DraftKind.TREE)
    assert given.parents.tolist() == [[-1, PADDING_NODE, PADDING_NODE], [PADDING_NODE] * 3]


@pytest.mark.parametrize("kind", [DraftKind.NONE, DraftKind.IN_PROCESS])
def test_slots_are_sent_when_they_change_only(
    kind: DraftKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = Uploader.start_upload

    def spy(self: Uploader, out: torch.Tensor) -> None:
        sent.append(len(out))
        send(self, out)

    monkeypatch.setattr(Uploader, "start_upload", spy)
    given = inputs(rows=2)
    for slots in ([4, 5], [4, 5], [5], [5], [4, 5]):
        given.fill_rows(rows(slots, [None] * len(slots)), kind)
        assert given.slots.tolist() == [*slots, PADDING][:2]
    assert sent == [2, 2, 2]
    # Drafts go with their slots, which are then known.
    given.fill_rows(rows([6], [tree([1])]), DraftKind.CHAIN)
    given.fill_rows(rows([6], [None]), kind)
    assert given.slots.tolist() == [6, PADDING]
    assert sent == [2, 2, 2, 2 * 4]


def test_a_round_without_rows_is_all_padding() -> None:
    given = inputs(rows=2, nodes=1)
    given.fill_rows(rows([], []), DraftKind.NONE)
    assert given.slots.tolist() == [PADDING, PADDING]


def test_what_was_made_in_inference_mode_can_be_told_outside_it() -> None:
    with torch.inference_mode():
        given, downloads = inputs(), Downloader(CPU)
        first = downloads.start_download(torch.tensor([1.0, 2.0]))
    given.fill_rows(rows([1], [tree([2])]), DraftKind.CHAIN)
    second = downloads.start_download(torch.tensor([3.0, 4.0]))
    assert given.slots.tolist() == [1, PADDING, PADDING, PADDING]
    assert (first.wait_tensor().tolist(), second.wait_tensor().tolist()) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_a_readback_stands_while_its_ring_goes_round(dtype: torch.dtype) -> None:
    downloads = Downloader(CPU)
    wanted = [
        torch.tensor([[n, -n], [2 * n, 0]]).to(dtype) for n in range(1, NUM_STAGING_BUFFERS + 1)
    ]
    started = [downloads.start_download(tensor) for tensor in wanted]
    for tensor, readback in zip(wanted, started, strict=True):
        assert torch.equal(readback.wait_tensor(), tensor)
        bits = tensor.view(torch.uint16) if dtype is torch.bfloat16 else tensor
        assert readback.wait_array().tolist() == bits.tolist()


def test_large_downloads_of_other_row_counts_share_a_ring_and_keep_their_own_rows() -> None:
    downloads = Downloader(CPU)
    wanted = [torch.full((rows, 1 << 12), float(rows)) for rows in (65, 128, 100)]
    started = [downloads.start_download(tensor) for tensor in wanted]
    for tensor, readback in zip(wanted, started, strict=True):
        assert torch.equal(readback.wait_tensor(), tensor)
        assert readback.wait_array().shape == tensor.shape
    assert downloads.num_rings == 1


def test_tensors_of_several_types_are_started_together() -> None:
    downloads = Downloader(CPU)
    words, values = torch.arange(4, dtype=torch.int32), torch.arange(4.0)
    first, second = downloads.start_downloads((words, values))
    assert torch.equal(first.wait_tensor(), words)
    assert torch.equal(second.wait_tensor(), values)


def test_drafts_that_are_all_full_lie_as_the_others_do() -> None:
    given, mixed = inputs(), inputs()
    trees = [tree([5, 6, 7], [-1, -1, 0]), tree([1, 2, 3])]
    given.fill_rows(rows([3, 1], trees), DraftKind.TREE)
    mixed.fill_rows(rows([3, 1, 2], [*trees, tree([8])]), DraftKind.TREE)
    assert given.drafts[:2].tolist() == mixed.drafts[:2].tolist() == [[5, 6, 7], [1, 2, 3]]
    assert given.parents[:2].tolist() == mixed.parents[:2].tolist()
    assert given.drafts[2:].eq(NO_TOKEN).all() and given.parents[2:].eq(PADDING_NODE).all()


def test_a_row_without_a_draft_stands_between_others() -> None:
    found = rows([4, 5, 6], [tree([1, 2]), None, tree([3])])
    assert found.counts.tolist() == [2, 0, 1] and found.max_nodes == 2
    assert found.tokens.tolist() == [1, 2, 3] and found.draft_kind is DraftKind.CHAIN
    assert found.distributions is None
