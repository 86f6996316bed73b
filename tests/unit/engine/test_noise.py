from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine import noise as engine_noise
from outrider.spec import noise as spec_noise
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream, stream_key


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    st.sampled_from(list(NoiseStream)),
    st.integers(0, 2**31),
    st.lists(st.integers(SHARED_DRAW_ID, 2**31 - 1), min_size=1, max_size=9),
)
def test_torch_and_numpy_make_identical_bits_and_uniforms(
    seeds: list[int], stream: NoiseStream, position: int, ids: list[int]
) -> None:
    seeds = [*seeds, 0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    expected = spec_noise.noise_bits(
        np.array(seeds, dtype=np.uint64)[:, None], stream, position, np.array(ids)
    )
    keys = _keys(seeds, stream, [position] * len(seeds))
    bits = engine_noise.noise_bits(keys[:, None], torch.tensor(ids))
    assert (bits.numpy().view(np.uint64) == expected).all()
    uniforms = engine_noise.uniform_from_bits(bits).numpy()
    assert (uniforms == spec_noise.uniform_from_bits(expected)).all()


def test_extreme_words_give_finite_noise() -> None:
    words = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 4095, 4096])
    uniforms = engine_noise.uniform_from_bits(words)
    expected = spec_noise.uniform_from_bits(words.numpy().view(np.uint64))
    assert (uniforms.numpy() == expected).all()
    assert float(uniforms.min()) > 0.0 and float(uniforms.max()) < 1.0
    assert bool(engine_noise.gumbel_from_bits(words).isfinite().all())


def _keys(seeds: list[int], stream: NoiseStream, positions: list[int]) -> Tensor:
    return engine_noise.noise_keys([stream_key(seed, stream) for seed in seeds], positions)


def _expected(scores: Tensor, seeds: list[int], ids: Tensor | None, k: int) -> np.ndarray:
    names = np.arange(scores.shape[1]) if ids is None else ids.numpy()
    noise = spec_noise.gumbel(np.array(seeds)[:, None], NoiseStream.TARGET, 9, names)
    return np.argsort(-(scores.numpy().astype(np.float64) + noise), axis=-1, kind="stable")[:, :k]


@pytest.mark.parametrize("columns", [1, 16, 1024, 1025, 5000])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("mapped", [False, True])
def test_perturbed_top_k_is_the_top_k_of_scores_plus_noise(
    columns: int, k: int, mapped: bool
) -> None:
    seeds = [4, 4, 5, 2**62, 4]
    scores = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.arange(columns) * 3 + 2 if mapped else None
    keys = _keys(seeds, NoiseStream.TARGET, [9] * 5)
    values, chosen = engine_noise.perturbed_topk(scores, keys, k, ids)
    present = min(k, columns)
    assert (chosen[:, :present].numpy() == _expected(scores, seeds, ids, present)).all()
    assert bool((values[:, :-1] >= values[:, 1:]).all())
    assert bool((chosen[:, present:] == -1).all())


@pytest.mark.parametrize("columns", [10, 2000])
def test_excluded_columns_are_never_chosen(columns: int) -> None:
    scores = torch.full((3, columns), -torch.inf)
    scores[:, columns - 2 :] = 0.0
    keys = _keys([1, 2, 3], NoiseStream.TARGET, [0, 0, 0])
    values, chosen = engine_noise.perturbed_topk(scores, keys, 4)
    assert set(chosen[:, :2].flatten().tolist()) == {columns - 2, columns - 1}
    assert bool((chosen[:, 2:] == -1).all()) and bool((values[:, 2:] == -torch.inf).all())


@pytest.mark.parametrize("k", [1, 4])
def test_rows_with_few_possible_columns_choose_as_if_all_noise_were_drawn(k: int) -> None:
    scores = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 3
    for row, kept in enumerate((5, 300, 900, 2999)):
        scores[row, torch.randperm(3000)[kept:]] = -torch.inf
    keys = _keys([7] * 4, NoiseStream.TARGET, [9] * 4)
    _, chosen = engine_noise.perturbed_topk(scores, keys, k)
    assert (chosen.numpy() == _expected(scores, [7] * 4, None, k)).all()


def test_threads_do_not_share_noise_buffers() -> None:
    scores = torch.randn(64, 3000, generator=torch.Generator().manual_seed(1))
    keys = _keys(list(range(64)), NoiseStream.TARGET, [0] * 64)
    expected = engine_noise.perturbed_argmax(scores, keys)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(10):
            found = engine_noise.perturbed_argmax(scores, keys)
            wrong.append(int((found != expected).sum()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 30
