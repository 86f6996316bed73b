from __future__ import annotations

import numpy as np
import torch

from outrider.engine.residual import ResidualSampler


def _walk(probs: list[float], ids: list[int], counts: list[int]) -> ResidualSampler:
    logprobs = torch.tensor(probs).log()
    return ResidualSampler(logprobs, np.array(ids, np.int32), np.array(counts, np.uint16))


def test_the_residual_is_max_of_p_minus_q_up_to_a_constant() -> None:
    probs = [0.5, 0.2, 0.2, 0.1]
    winner, change = _walk(probs, [1, 2], [3, 1]).try_children([(0, 1)], [0.2], [0.99])
    assert winner is None and change is not None
    residual = np.array(probs)
    residual[change[0]] = np.exp(change[1])
    expected = np.maximum(np.array(probs) - [0.0, 0.75, 0.25, 0.0], 0.0)
    np.testing.assert_allclose(residual / residual.sum(), expected / expected.sum(), atol=1e-7)


def test_a_second_child_is_tried_against_the_residual_of_the_first() -> None:
    """p' = (.6 - .25, .4 - .75) normalised = (1, 0); q' = (1, 0): the second child must stand."""
    children, probs = [(0, 1), (1, 0)], [0.4, 0.6]
    winner, _ = _walk([0.6, 0.4], [0, 1], [1, 3]).try_children(
        children, probs, [0.9, 1.0 - 2.0**-53]
    )
    assert winner == (1, 0)


def test_an_empty_residual_asks_for_the_target_law_itself() -> None:
    """Only rounding can reject where p = q; a random draw of 1, which does not exist, stands in for
    it."""
    assert _walk([1.0, 0.0], [0], [9]).try_children([(0, 0)], [1.0], [1.0]) == (None, None)
