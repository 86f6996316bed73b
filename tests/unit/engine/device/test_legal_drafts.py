"""What grammars leave of a head's logits."""

from __future__ import annotations

import math

import numpy as np
import torch

from outrider.engine.device.legal_drafts import only_legal


def bits_of(rows: list[list[int]], vocab: int) -> torch.Tensor:
    """int32 [B, W]: bit sets of target ids."""
    words = np.zeros((len(rows), -(-vocab // 32)), dtype=np.uint32)
    for row, ids in enumerate(rows):
        for token in ids:
            words[row, token >> 5] |= np.uint32(1 << (token & 31))
    return torch.from_numpy(words.view(np.int32))


def test_columns_whose_target_ids_are_not_legal_are_cut() -> None:
    ids = torch.tensor([3, 31, 32, 63, 69])
    logits = torch.arange(10.0).view(2, 5)
    found = only_legal(logits, bits_of([[31, 63, 5], [3, 69]], 70), ids)
    cut = -math.inf
    assert found.tolist() == [[cut, 1.0, cut, 3.0, cut], [5.0, cut, cut, cut, 9.0]]


def test_a_row_with_nothing_legal_is_left_as_it_is() -> None:
    ids = torch.tensor([3, 31, 32])
    logits = torch.ones(2, 3, dtype=torch.bfloat16)
    found = only_legal(logits, bits_of([[4, 5], [32]], 40), ids)
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 1.0, 1.0], [-math.inf, -math.inf, 1.0]]
