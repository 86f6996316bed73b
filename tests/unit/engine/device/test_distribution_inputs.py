"""Laws of a launch in static memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.device.inputs.distribution_inputs import DistributionInputs
from outrider.engine.draft_sampling import MAX_DISTRIBUTION_ENTRIES
from outrider.spec.draft_distribution import DraftDistribution, make_distribution

CPU = torch.device("cpu")


def make(num_nodes: int, sizes: dict[int, int], *, seed: int = 0) -> DraftDistribution:
    """A distribution of a chain of `num_nodes` nodes with so many entries by slot."""
    rng = np.random.default_rng(seed)
    return make_distribution(
        num_nodes,
        {
            slot: (
                np.sort(rng.choice(100_000, size, replace=False)).astype(np.int32),
                rng.integers(1, 65536, size).astype(np.uint16),
            )
            for slot, size in sizes.items()
        },
    )


def read(
    inputs: DistributionInputs, rows: int, nodes: int
) -> list[list[tuple[list[int], list[int]]]]:
    """By row and node, what the device sees."""
    distribution = inputs.distribution_of(rows, nodes)
    return [
        [
            (distribution.ids[begin:end].tolist(), distribution.counts[begin:end].tolist())
            for begin, end in row
        ]
        for row in distribution.ranges.tolist()
    ]


def entries(distribution: DraftDistribution, nodes: int) -> list[tuple[list[int], list[int]]]:
    """The same of a distribution itself."""
    known = len(distribution.offsets) - 1
    found = [distribution.entries(slot) for slot in range(min(nodes, known))]
    filled = [(ids.tolist(), counts.tolist()) for ids, counts in found]
    return filled + [([], [])] * (nodes - len(filled))


NOTHING: list[tuple[list[int], list[int]]] = [([], [])] * 5


def test_laws_lie_behind_each_other_by_row_and_node() -> None:
    inputs = DistributionInputs(max_rows=4, device=CPU)
    distributions = [make(3, {0: 5, 1: 9000, 2: 1}), None, make(1, {0: 77}, seed=1)]
    inputs.fill_distributions(distributions, 4, 5)
    first, last = distributions[0], distributions[2]
    assert first is not None and last is not None
    assert read(inputs, 4, 5) == [entries(first, 5), NOTHING, entries(last, 5), NOTHING]


def test_a_launch_without_laws_sees_none_of_the_one_before() -> None:
    inputs = DistributionInputs(max_rows=4, device=CPU)
    inputs.fill_distributions([make(2, {0: 5, 1: 5})], 2, 5)
    inputs.fill_distributions([None, None], 2, 5)
    assert read(inputs, 2, 5) == [NOTHING, NOTHING]
    inputs.fill_distributions([None, make(1, {0: 3})], 2, 5)
    assert read(inputs, 2, 5)[0] == NOTHING


def test_buckets_have_offsets_of_their_own() -> None:
    inputs = DistributionInputs(max_rows=4, device=CPU)
    inputs.fill_distributions([make(1, {0: 4})], 1, 2)
    inputs.fill_distributions([make(3, {0: 4, 1: 2, 2: 6}, seed=3)], 2, 4)
    assert read(inputs, 2, 4)[0] == entries(make(3, {0: 4, 1: 2, 2: 6}, seed=3), 4)


@pytest.mark.parametrize("size", [MAX_DISTRIBUTION_ENTRIES, MAX_DISTRIBUTION_ENTRIES + 1])
def test_a_law_beyond_the_budget_is_left_out(size: int) -> None:
    inputs = DistributionInputs(max_rows=2, device=CPU)
    large, small = make(1, {0: size}), make(1, {0: 10}, seed=1)
    inputs.fill_distributions([large, small], 2, 2)
    rows = read(inputs, 2, 2)
    assert rows[0] == (entries(large, 2) if size == MAX_DISTRIBUTION_ENTRIES else NOTHING[:2])
    assert rows[1] == entries(small, 2)


def test_laws_that_find_no_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "outrider.engine.device.inputs.distribution_inputs.MAX_FULL_DISTRIBUTIONS", 1
    )
    inputs = DistributionInputs(max_rows=3, device=CPU)
    distributions = [make(1, {0: MAX_DISTRIBUTION_ENTRIES - 4}, seed=s) for s in range(2)] + [
        make(1, {0: 4})
    ]
    inputs.fill_distributions(distributions, 3, 2)
    assert read(inputs, 3, 2) == [
        entries(distributions[0], 2),
        NOTHING[:2],
        entries(distributions[2], 2),
    ]
