"""What a target thinks of a text, by one full forward over all of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.wire.logprobs import TokenLogprobs


def full_forward(target: TargetModel, ids: Sequence[int]) -> NDArray[np.float64]:
    """Logarithms [n, V] of what follows each id."""
    sequence = target.pool.new_sequence()
    assert sequence.reserve(len(ids))
    batch = ForwardBatch(
        token_ids=torch.tensor(ids),
        segments=[Segment(sequence=sequence, num_rows=len(ids), positions=torch.arange(len(ids)))],
    )
    with torch.inference_mode():
        logits = target.forward(batch).logits.double()
    sequence.release()
    return np.asarray(logits.log_softmax(dim=-1).numpy())


def assert_the_targets_own(
    target: TargetModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int,
) -> None:
    """Every number within 1e-4 of that of a full forward."""
    assert len(logprobs) == len(tokens)
    distributions = full_forward(target, [*prompt, *tokens])[len(prompt) - 1 : -1]
    for distribution, token, entry in zip(distributions, tokens, logprobs, strict=True):
        assert entry.logprob == pytest.approx(distribution[token], abs=1e-4)
        assert len(entry.top) == top
        best = np.sort(distribution)[::-1][:top]
        np.testing.assert_allclose([value for _, value in entry.top], best, atol=1e-4)
        np.testing.assert_allclose(distribution[[token for token, _ in entry.top]], best, atol=1e-4)
