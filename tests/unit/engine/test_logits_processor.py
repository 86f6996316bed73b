from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.logits_processor import (
    EMPTY_HISTORY,
    TokenHistory,
    apply_logits_processor,
    plain_argmax,
)
from outrider.spec.sampling import SamplingParams
from tests.reference.acceptance_oracle import penalised, warped_probs

SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 5, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    banned_ids=st.sampled_from([(), (0, 4), (39,)]),
)


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


@settings(max_examples=60)
@given(st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 2**16))
def test_every_setting_matches_the_written_definition(
    params: list[SamplingParams], seed: int
) -> None:
    logits = _logits(len(params), 40, seed)
    history = TokenHistory(
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=np.array([4, 5, 4], np.int32),
        path_ids=(6, 4),
        banned_now=(7,),
    )
    probs = apply_logits_processor(logits, params, [history] * len(params)).softmax(-1).numpy()
    for row, row_params in enumerate(params):
        expected = warped_probs(
            logits[row].numpy().astype(np.float64),
            row_params,
            prompt=[1, 2, 3],
            output=[4, 5, 4, 6, 4],
            banned_now=[7],
        )
        assert ((probs[row] == 0) == (expected == 0)).all()
        np.testing.assert_allclose(probs[row], expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_the_nucleus_of_a_wide_row_is_the_smallest_set_with_that_mass(
    top_p: float, spread: float
) -> None:
    logits = _logits(2, 9000) * spread
    params = [SamplingParams(temperature=1.0, top_p=top_p)] * 2
    kept = (apply_logits_processor(logits, params, [EMPTY_HISTORY] * 2) > -math.inf).numpy()
    for row in range(2):
        probs = logits[row].double().softmax(-1).numpy()
        inside = probs[kept[row]]
        assert inside.sum() > top_p - 2e-6
        assert inside.sum() - inside.min() < top_p + 2e-6
        assert probs[~kept[row]].max(initial=0.0) < inside.min()
        assert kept[row][logits[row].argmax()]


def test_equal_logits_at_a_boundary_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=math.exp(-1.0) - 1e-6),
    ):
        kept = apply_logits_processor(logits, [params], [EMPTY_HISTORY]) > -math.inf
        assert kept.tolist() == [[True, True, True, True, False]]


def test_penalties_count_the_drafts_on_the_path_as_output() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = torch.ones(1, 5)
    history = TokenHistory(output_ids=np.array([1], np.int32), path_ids=(2, 1))
    warped = apply_logits_processor(logits, [params], [history])
    assert warped.tolist() == [[1.0, 1.0 - 1.25, 1.0 - 0.75, 1.0, 1.0]]
    assert logits.tolist() == [[1.0] * 5], "the input is left alone"


def test_greedy_rows_are_neither_scaled_nor_cut() -> None:
    logits = _logits(2, 30)
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)
    assert apply_logits_processor(logits, [params] * 2, [EMPTY_HISTORY] * 2) is logits


def test_settings_speak_of_target_ids_whatever_the_columns_are() -> None:
    """A draft head's columns are mapped; ids outside its vocabulary are ignored."""
    target_ids = torch.tensor([3, 10, 11, 20])
    params = SamplingParams(
        temperature=1.0, banned_ids=(10, 5), repetition_penalty=2.0, frequency_penalty=1.0
    )
    history = TokenHistory(
        prompt_ids=np.array([20, 999], np.int32), output_ids=np.array([4, 11, 11], np.int32)
    )
    logits = torch.tensor([[1.0, 1.0, -1.0, 4.0]])
    warped = apply_logits_processor(logits, [params], [history], target_ids=target_ids)
    assert warped.tolist() == [[1.0, -math.inf, -2.0 - 2.0, 2.0]]
    full = torch.zeros(1, 30)
    full[0, target_ids] = logits[0]
    expected = penalised(
        full[0].numpy().astype(np.float64), params, prompt=[20], output=[4, 11, 11]
    )
    assert warped[0].tolist() == expected[target_ids.numpy()].tolist()


def test_nan_and_infinities_are_tamed_without_touching_other_rows() -> None:
    params = [SamplingParams(temperature=0.5, banned_ids=(0,))] * 4
    logits = _logits(4, 12)
    good = apply_logits_processor(logits[3:], params[3:], [EMPTY_HISTORY])
    logits[0] = math.nan
    logits[1, 5] = math.nan
    logits[2, 6] = math.inf
    warped = apply_logits_processor(logits, params, [EMPTY_HISTORY] * 4)
    assert not bool(warped.isnan().any()) and not bool((warped == math.inf).any())
    assert warped.argmax(-1)[0] == 1, "the first id that is not banned"
    assert warped[1, 5] == -math.inf
    assert warped.softmax(-1)[2, 6] == 1.0
    assert torch.equal(warped[3:], good)


def test_the_tiniest_temperature_does_not_overflow() -> None:
    params = SamplingParams(temperature=5e-324)
    warped = apply_logits_processor(
        torch.tensor([[1e20, 3.0, math.inf]]), [params], [EMPTY_HISTORY]
    )
    assert bool(warped.isfinite().all())
    assert warped.softmax(-1)[0].tolist() == [0.0, 0.0, 1.0]


def test_argmax_takes_the_first_of_equals_and_never_a_nan() -> None:
    nan = math.nan
    rows = torch.tensor([[1.0, 3.0, 3.0], [nan, 1.0, 2.0], [nan, nan, nan], [1.0, nan, 0.0]])
    assert plain_argmax(rows).tolist() == [1, 2, 0, 0]
