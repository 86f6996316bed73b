"""What sampling parameters may be."""

from __future__ import annotations

import math

import pytest

from outrider.errors import InvalidRequestError
from outrider.spec.sampling import MAX_BIASED_IDS, SamplingParams


def test_a_bias_may_name_any_distinct_ids() -> None:
    entries = tuple((id_, 100.0 * (-1) ** id_) for id_ in range(MAX_BIASED_IDS))
    assert SamplingParams(logit_bias=entries).logit_bias == entries


@pytest.mark.parametrize(
    "entries",
    [
        ((1, 0.5), (1, 0.5)),
        ((-1, 0.5),),
        ((1, 100.5),),
        ((1, -math.inf),),
        ((1, math.nan),),
        tuple((id_, 0.0) for id_ in range(MAX_BIASED_IDS + 1)),
    ],
)
def test_other_biases_are_refused(entries: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=entries)
