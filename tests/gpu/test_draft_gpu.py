"""Drafting on a GPU: kernels against their PyTorch references, graphs against eager, device against
host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.proposers.eagle import EagleProposer
from torch import Tensor

from outrider.engine.device.current_device import init_launching_thread
from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.transfer.pinned_memory import pin_memory
from outrider.engine.kernels.drafts import growth, tree_rank
from outrider.engine.kernels.drafts import inputs as draft_inputs
from outrider.engine.kernels.drafts.growth import (
    FrontierRows,
    empty_candidates,
    num_candidates,
)
from outrider.engine.kernels.drafts.tree_rank import TreeDraft
from outrider.spec.sampling import SamplingParams
from outrider.transport.shm import is_ring_view
from outrider.wire.codec import decode_verifier_messages, encode_verifier_messages
from outrider.wire.messages import Proposal, Verdict, Verdicts
from tests.factories import make_eagle3_head
from tests.fakes.shm_channels import lane_pair
from tests.unit.drafter.helpers import CHAIN, make_engine
from tests.unit.drafter.mixed_sessions import (
    COUPLED,
    MIX,
    random_ends,
    side_by_side,
    together,
    told,
)
from tests.unit.engine.device.draft_sessions import (
    DETERMINISTIC,
    MIXED,
    ROUNDS,
    Sessions,
    plain_head,
    total,
    tree_of,
)

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3_head(tmp_path_factory.mktemp("gpu-head"))


def sessions(
    checkpoint: Path,
    device: str = "cuda:0",
    dtype: torch.dtype = torch.float32,
    sampling: Sequence[SamplingParams] = MIXED,
) -> Sessions:
    return Sessions(plain_head(checkpoint, dtype=dtype, device=device), sampling, device, dtype)


def tree(s: Sessions, rows: NewRows) -> TreeDraft:
    return s.program.draft_tree(rows, state=s.state, num_nodes=24, top_k=6, depth=4)


@torch.inference_mode()
def test_chains_and_trees_are_those_of_the_cpu(checkpoint: Path) -> None:
    here, there = sessions(checkpoint), sessions(checkpoint, "cpu")
    for starts, counts in ROUNDS:
        chains = [
            s.program.draft_chain(s.rows(starts, counts, 9), state=s.state, length=5).tokens[:-1]
            for s in (here, there)
        ]
        assert chains[0].tolist() == chains[1].tolist()
    here, there = (
        sessions(checkpoint, sampling=DETERMINISTIC),
        sessions(checkpoint, "cpu", sampling=DETERMINISTIC),
    )
    for starts, counts in ROUNDS:
        trees = [tree(s, s.rows(starts, counts, 9)) for s in (here, there)]
        for row in range(len(DETERMINISTIC)):
            found, expected = tree_of(trees[0], row), tree_of(trees[1], row)
            assert found[:2] == expected[:2]
            np.testing.assert_allclose(found[2], expected[2], atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["chain", "law", "tree"])
def test_a_graph_drafts_what_eager_launches_draft(
    checkpoint: Path, dtype: torch.dtype, kind: str
) -> None:
    def draft(s: Sessions, rows: NewRows) -> tuple[Tensor, ...]:
        if kind == "tree":
            return tree(s, rows)
        distributions = torch.zeros(
            len(s.state.rules), 5, len(s.forward.vocabulary.target_ids), device=CUDA
        )
        kept = distributions if kind == "law" else None
        chain = s.program.draft_chain(rows, state=s.state, length=5, draft_distributions=kept)
        return (chain.tokens, chain.columns, distributions[rows.slots.long()])

    eager, graphed = sessions(checkpoint, dtype=dtype), sessions(checkpoint, dtype=dtype)
    graphs, static = GraphCache(CUDA), graphed.rows(*ROUNDS[0], 9)
    for starts, counts in [*ROUNDS, *ROUNDS]:
        for to, new in zip(static, graphed.rows(starts, counts, 9), strict=True):
            to.copy_(new)
        found = graphs.run_graph(kind, lambda: draft(graphed, static))
        expected = draft(eager, eager.rows(starts, counts, 9))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[:-1], other[:-1])
    assert len(graphs) == 1
    assert torch.equal(eager.storage, graphed.storage)


@torch.inference_mode()
@pytest.mark.parametrize("width", [9, 40])
def test_pruning_dead_rows_changes_no_draft(checkpoint: Path, width: int) -> None:
    pruned, whole = sessions(checkpoint), sessions(checkpoint)
    for starts, counts in ROUNDS:
        drafts = [
            s.program.draft_chain(
                s.rows(starts, counts, width), state=s.state, length=4, prune=s is pruned
            ).tokens[:-1]
            for s in (pruned, whole)
        ]
        assert drafts[0].tolist() == drafts[1].tolist()


@torch.inference_mode()
def test_dead_rows_and_padding_are_written_nowhere(checkpoint: Path) -> None:
    s = sessions(checkpoint)
    lengths = total(*ROUNDS[0])
    s.forward.write_rows(s.rows([0, 0, 0], lengths, 16))
    for row, length in enumerate(lengths):
        kept = s.kept(row, 64)
        assert kept[:, :, length:].eq(0).all() and kept[:, :, :length].ne(0).any(-1).all()


@pytest.mark.parametrize(
    ("batch", "k", "depth", "nodes"),
    [(1, 10, 7, 60), (8, 4, 4, 12), (3, 32, 4, 256), (64, 1, 3, 3)],
)
def test_tree_kernels_equal_their_twins(batch: int, k: int, depth: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(k)
    width = min(k, nodes)
    size = num_candidates(k, width, depth)
    lists = [empty_candidates(batch, size, device) for device in (CPU, CUDA)]
    above: dict[torch.device, FrontierRows] = {}
    masks: dict[torch.device, Tensor] = {}
    first = 0
    for level in range(depth):
        shape = (batch * (width if level else 1), k)
        # Few distinct values: many ties.
        logprobs = -torch.randint(0, 9, shape, generator=generator).float() / 8
        columns = torch.randint(0, 32000, shape, generator=generator, dtype=torch.int32)
        for candidates, device in zip(lists, (CPU, CUDA), strict=True):
            offered = logprobs.to(device), columns.to(device)
            above[device] = growth.select_frontier(
                *offered, above.get(device), candidates, first, width=width
            )
            masks[device] = growth.grow_mask(masks.get(device), above[device].parents)
        for one, other in zip(above[CPU], above[CUDA], strict=True):
            assert torch.equal(one, other.cpu())
        assert torch.equal(masks[CPU], masks[CUDA].cpu())
        first += k * shape[0] // batch
    ids = torch.arange(32000) * 2
    expected = tree_rank.rank_tree(lists[0], ids, num_nodes=nodes)
    found = tree_rank.rank_tree(lists[1], ids.to(CUDA), num_nodes=nodes)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_and_layout_equal_their_twins(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens = torch.randint(-1, 500, (48,), generator=generator, dtype=torch.int32)
    tensors = (tokens, random(48, 4096), random(1000, 4096), random(4096), random(4096))
    ids = torch.randperm(1000, generator=generator)[:500]
    rows = torch.randint(0, 48, (48,), generator=generator, dtype=torch.int32)
    for normed in (False, True):
        expected = draft_inputs.head_inputs(
            *tensors, eps=1e-5, ids=ids, rows=rows, norm_before_residual=normed
        )
        found = draft_inputs.head_inputs(
            *(t.to(CUDA) for t in tensors),
            eps=1e-5,
            ids=ids.to(CUDA),
            rows=rows.to(CUDA),
            norm_before_residual=normed,
        )
        for one, other in zip(expected, found, strict=True):
            # One unit in the last place, where the sum's order rounds it the other way.
            torch.testing.assert_close(
                one, other.cpu(), rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
            )
    tables = torch.randperm(4000, generator=generator)[:3000].view(100, 30).int()
    slots = torch.randint(0, 100, (64,), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 9, (64,), generator=generator, dtype=torch.int32)
    starts = torch.randint(0, 480, (64,), generator=generator, dtype=torch.int32)
    arguments = (counts, starts, tables, slots)
    layouts = [
        draft_inputs.draft_layout(
            *(t.to(device) for t in arguments),
            num_rows=8,
            num_steps=5,
            step_rows=10,
            block_tokens=16,
        )
        for device in (CPU, CUDA)
    ]
    for one, other in zip(*layouts, strict=True):
        assert torch.equal(one, other.cpu())


def on_device(checkpoint: Path, *, graphs: bool = True) -> GpuEagleProposer:
    return GpuEagleProposer(
        plain_head(checkpoint, device="cuda:0"),
        max_rows=8192,
        max_context=256,
        max_sessions=16,
        dtype=torch.float32,
        device=CUDA,
        cuda_graphs=graphs,
    )


def assert_same_drafts(
    found: list[dict[str, Proposal]], expected: list[dict[str, Proposal]], sessions: int
) -> None:
    for name, ours, theirs in side_by_side(found, expected, sessions):
        assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist(), name
        assert ours.tree.parents.tolist() == theirs.tree.parents.tolist()


@pytest.mark.parametrize("graphs", [True, False])
def test_the_device_source_proposes_what_the_host_source_on_a_cpu_does(
    checkpoint: Path, graphs: bool
) -> None:
    device = on_device(checkpoint, graphs=graphs)
    if graphs:
        device.compile_kernels()
        assert len(device.graphs) == 0
        device.warm_up()
        device.graphs.sealed = False
        assert len(device.graphs) > 0
    host = EagleProposer(plain_head(checkpoint), max_rows=8192)
    found, expected = (
        told(make_engine([source]), MIX, random_ends(4, seed=4)) for source in (device, host)
    )
    assert_same_drafts(found, expected, len(MIX))


def test_features_are_read_from_the_lane_that_brings_them(checkpoint: Path) -> None:
    init_launching_thread(CUDA)
    mix = [(CHAIN, sampling) for sampling in (SamplingParams(), COUPLED) * 7]
    # Enough of them that they cross in the lane's ring.
    ends = [[12 + step * 10] * len(mix) for step in range(5)]
    pinned, lent = [], []

    def pin_it(memory: NDArray[np.uint8]) -> bool:
        pinned.append(pin_memory(memory, CUDA))
        return pinned[-1]

    with lane_pair() as (ours, theirs):
        theirs.pin_for_reader(pin_it)

        def through_lane(entries: Sequence[Verdict]) -> list[Verdicts]:
            ours.send(*encode_verifier_messages(together(entries)))
            (frame,) = theirs.receive_views()
            (message,) = decode_verifier_messages(frame)
            assert isinstance(message, Verdicts) and message.features is not None
            lent.append(is_ring_view(message.features.joined()))
            return [message]

        found = told(make_engine([on_device(checkpoint)]), mix, ends, through_lane)
        assert pinned == [True] and lent == [True] * len(ends)
    host = EagleProposer(plain_head(checkpoint), max_rows=8192)
    assert_same_drafts(found, told(make_engine([host]), mix, ends, together), len(mix))
