"""What grammars leave of a head's logits: the rows and levels that were filled, and no others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.engine.device.drafting.draft_masks import DraftTokenMasks
from outrider.engine.kernels.drafts.token_masks import mask_drafts_torch, mask_drafts_triton
from outrider.engine.kernels.runtime import INTERPRETED
from outrider.engine.kernels.session_tensors import AllowedTokenBits
from outrider.grammar.constraint import Mask, mask_of

VOCAB = 70
IDS = torch.tensor([3, 31, 32, 63, 69])
"""Of the draft vocabulary."""


def masks_of(levels: int = 2, max_rows: int = 4) -> DraftTokenMasks:
    return DraftTokenMasks(
        levels=levels,
        max_rows=max_rows,
        vocab_size=VOCAB,
        target_ids=IDS,
        device=torch.device("cpu"),
    )


def mask(*ids: int) -> Mask:
    return mask_of(ids, -(-VOCAB // 32))


def left(masks: DraftTokenMasks, level: int, rows: int) -> list[list[int]]:
    """The ids that may be drafted, by row."""
    logits = masks.apply_masks(torch.zeros(rows, len(IDS)), level, IDS)
    assert set(logits.flatten().tolist()) <= {0.0, -math.inf}
    return [IDS[row == 0.0].tolist() for row in logits]


EVERY = IDS.tolist()


def test_a_row_may_have_at_each_level_what_its_mask_says() -> None:
    masks = masks_of()
    masks.set_masks([np.stack([mask(31, 63, 5), mask(69)]), None, np.stack([mask(3)])], 4)
    assert left(masks, 0, 4) == [[31, 63], EVERY, [3], EVERY]
    assert left(masks, 1, 4) == [[69], EVERY, EVERY, EVERY]
    assert left(masks, 2, 4) == [EVERY] * 4, "no mask reaches beyond its levels"


def test_masks_beyond_the_levels_are_left_out() -> None:
    masks = masks_of(levels=1)
    masks.set_masks([np.stack([mask(3), mask(31), mask(32)])], 1)
    assert left(masks, 0, 1) == [[3]]


def test_where_the_draft_vocabulary_has_nothing_that_is_legal_it_may_draft_anything() -> None:
    masks = masks_of()
    masks.set_masks([np.stack([mask(4, 5), mask(32)])], 1)
    assert left(masks, 0, 1) == [EVERY]
    assert left(masks, 1, 1) == [[32]]


def test_a_launch_without_masks_has_none_of_the_last_ones_whatever_its_size() -> None:
    for rows in (1, 2, 4):
        masks = masks_of()
        masks.set_masks([np.stack([mask(3), mask(31)])] * 4, 4)
        masks.set_masks([], rows)
        assert left(masks, 0, rows) == left(masks, 1, rows) == [EVERY] * rows
        masks.set_masks([], 4)
        assert left(masks, 1, 4) == [EVERY] * 4


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("rows", [1, 5])
def test_the_kernel_leaves_what_its_twin_leaves(rows: int) -> None:
    """Draft vocabularies beyond one tile, rows with and without bits."""
    rng = np.random.default_rng(rows)
    ids = torch.from_numpy(np.sort(rng.permutation(9000)[:5000]))
    places = torch.tensor([row % 3 for row in range(rows)], dtype=torch.int32)
    bits = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (3, 282), dtype=np.int32))
    logits = torch.randn(rows, len(ids))
    found, wanted = logits.clone(), logits.clone()
    mask_drafts_triton(found, AllowedTokenBits(bits, places), ids)
    mask_drafts_torch(wanted, AllowedTokenBits(bits, places), ids)
    assert torch.equal(found, wanted)
    same = (found == logits).all(dim=1)
    assert same.tolist() == [place == 0 for place in places.tolist()]


@pytest.mark.parametrize("ring", [0, 3])
def test_words_beside_the_masks_go_up_with_them(ring: int) -> None:
    masks = DraftTokenMasks(
        levels=1,
        max_rows=4,
        vocab_size=VOCAB,
        target_ids=IDS,
        device=torch.device("cpu"),
        num_beside=8,
        ring=ring,
    )
    for count in (8, 3, 5):
        words = np.arange(count, dtype=np.int32) + count
        masks.set_masks([mask(31)[None], None, mask(3, 69)[None]], 4, words)
        assert masks.beside[:count].tolist() == words.tolist()
        assert left(masks, 0, 4) == [[31], EVERY, [3, 69], EVERY]
        masks.set_masks([], 2, words)
        assert masks.beside[:count].tolist() == words.tolist()
        assert left(masks, 0, 2) == [EVERY, EVERY]
