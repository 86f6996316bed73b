from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.spec.draft_distribution import (
    DraftDistribution,
    make_distribution,
    validate_distribution,
)
from outrider.spec.tree import DraftTree

VOCAB = 100


def _i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _u16(*values: int) -> NDArray[np.uint16]:
    return np.array(values, dtype=np.uint16)


TREE = DraftTree(_i32(5, 9, 7), _i32(-1, -1, 1), np.zeros(3, np.float32))
LAW = make_distribution(3, {2: (_i32(7, 8), _u16(3, 1)), 0: (_i32(2, 5, 9), _u16(1, 65535, 4))})


def test_entries_are_filed_by_slot_and_probabilities_are_count_ratios() -> None:
    assert LAW.offsets.tolist() == [0, 3, 3, 5, 5]
    ids, probs = LAW.draft_probs(0)
    assert ids.dtype == np.int64 and ids.tolist() == [2, 5, 9]
    assert probs.tolist() == [1 / 65540, 65535 / 65540, 4 / 65540]
    assert [len(part) for part in LAW.draft_probs(1)] == [0, 0]
    assert LAW.draft_probs(2)[1].tolist() == [0.75, 0.25]
    validate_distribution(LAW, TREE, VOCAB)


@pytest.mark.parametrize(
    "bad",
    [
        replace(LAW, offsets=_i32(0, 3, 3, 5)),
        replace(LAW, offsets=_i32(0, 3, 3, 4, 4)),
        replace(LAW, offsets=_i32(1, 3, 3, 5, 5)),
        replace(LAW, offsets=_i32(0, 5, 3, 5, 5)),
        replace(LAW, offsets=_i32(0, 3, 5, 5, 5)),  # node 0 has no children
        replace(LAW, offsets=_i32(0, 5, 5, 5, 5)),  # node 1 has one
        replace(LAW, offsets=LAW.offsets.astype(np.int64)),
        replace(LAW, ids=_i32(2, 9, 5, 7, 8)),
        replace(LAW, ids=_i32(2, 5, 5, 7, 8)),
        replace(LAW, ids=_i32(-2, 5, 9, 7, 8)),
        replace(LAW, ids=_i32(2, 5, 9, 7, VOCAB)),
        replace(LAW, ids=_i32(2, 5, 10, 7, 8)),  # 9 cannot have been drawn
        replace(LAW, ids=_i32(2, 5, 9, 7)),
        replace(LAW, counts=_u16(1, 2, 3, 0, 1)),
        replace(LAW, counts=_u16(1, 2, 3)),
        replace(LAW, counts=LAW.counts.astype(np.int32)),
        replace(LAW, counts=LAW.counts[:, None]),
    ],
)
def test_a_law_that_does_not_fit_its_tree_is_refused(bad: DraftDistribution) -> None:
    with pytest.raises(InvalidMessageError):
        validate_distribution(bad, TREE, VOCAB)


def test_the_law_of_an_empty_tree_is_empty() -> None:
    tree = DraftTree(_i32(), _i32(), np.zeros(0, np.float32))
    validate_distribution(make_distribution(0, {}), tree, VOCAB)
