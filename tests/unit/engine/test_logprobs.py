"""Log-probabilities of tokens, against a plain softmax in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.engine.logprobs import MAX_ROWS, LogprobPath, path_logprobs, token_logprobs
from outrider.spec.sampling import LOWEST_LOGPROB


def oracle(logits: torch.Tensor) -> np.ndarray:
    """Logarithms of the softmax of each row, float64."""
    wide = logits.numpy().astype(np.float64)
    exps = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.log(exps / exps.sum(axis=1, keepdims=True))


def test_paths_have_the_logarithms_of_their_rows() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)) * 8
    distributions = oracle(logits)
    rng = np.random.default_rng(2)
    paths = [
        LogprobPath(rng.integers(200, size=n).tolist(), rng.integers(50, size=n).tolist(), top)
        for n, top in ((1, 0), (3, 20), (MAX_ROWS, 5), (MAX_ROWS + 7, 1))
    ]
    for path, found in zip(paths, path_logprobs(logits, paths), strict=True):
        rows = distributions[path.rows]
        assert found.values.shape == (len(path.rows), 1 + path.top)
        assert found.top_ids.shape == (len(path.rows), path.top)
        own = rows[np.arange(len(rows)), path.tokens]
        np.testing.assert_allclose(found.values[:, 0], own, atol=1e-5)
        best = -np.sort(-rows, axis=1)[:, : path.top]
        np.testing.assert_allclose(found.values[:, 1:], best, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(rows, found.top_ids, 1), best, atol=1e-5)


def test_no_more_ids_are_given_than_there_are() -> None:
    (found,) = path_logprobs(torch.zeros(1, 4), [LogprobPath([0], [2], 20)])
    assert found.values[0].tolist() == pytest.approx([math.log(0.25)] * 5)
    assert sorted(found.top_ids[0].tolist()) == [0, 1, 2, 3]


def test_nobody_who_asks_costs_nothing() -> None:
    assert path_logprobs(torch.zeros(1, 4), []) == []


@pytest.mark.parametrize(
    ("row", "token", "own", "top"),
    [
        ([0.0, -math.inf, -1e30], 1, LOWEST_LOGPROB, [0.0, LOWEST_LOGPROB]),
        ([math.nan, 0.0, 0.0], 0, LOWEST_LOGPROB, [math.log(0.5)] * 2),
        ([math.nan] * 3, 0, LOWEST_LOGPROB, [LOWEST_LOGPROB] * 2),
        ([math.inf, 0.0, 0.0], 0, 0.0, [0.0, LOWEST_LOGPROB]),
    ],
    ids=["nought", "nan", "nothing", "infinite"],
)
def test_what_is_no_number_stays_within_bounds(
    row: list[float], token: int, own: float, top: list[float]
) -> None:
    values, _ = token_logprobs(torch.tensor([row]), torch.tensor([token]), 2)
    assert values[0].tolist() == pytest.approx([own, *top])


def test_a_certain_token_is_not_more_than_certain() -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(3))
    logits[:, 7] = 60.0
    values, _ = token_logprobs(logits, torch.full((64,), 7), 1)
    assert float(values.max()) <= 0.0 and float(values[:, 0].min()) > -1e-4
