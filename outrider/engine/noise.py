"""PyTorch implementation of `outrider.spec.noise`, and Gumbel-perturbed argmax and top-k.

int64 tensors hold unsigned 64-bit words: addition and multiplication wrap around as in uint64, and
a logical right shift is an arithmetic shift with the sign bits masked off. All bits equal those of
the numpy implementation.

Shape suffixes: A rows, V ids (columns), C candidates.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.spec.digest import TOKEN_OFFSET
from outrider.spec.mix64 import GOLDEN64, MULTIPLIER_A, MULTIPLIER_B, mix64_array
from outrider.spec.noise import gumbel_from_bits as gumbel_from_words
from outrider.spec.noise import noise_keys as numpy_noise_keys

BATCHED_COLUMNS = 1024
"""Maximum number of columns of rows that a CPU processes together. Wider rows are processed one by
one, so that a row's noise stays in the cache."""


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(GOLDEN64)
_MULTIPLIER_A = _signed(MULTIPLIER_A)
_MULTIPLIER_B = _signed(MULTIPLIER_B)
_TOKEN_OFFSET = _signed(TOKEN_OFFSET)


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def mix64_(x: Tensor) -> Tensor:
    """Apply the finaliser `outrider.spec.mix64.mix64` to every word of an int64 tensor in place,
    and return the tensor."""
    _xor_shift_(x, 30).mul_(_MULTIPLIER_A)
    _xor_shift_(x, 27).mul_(_MULTIPLIER_B)
    return _xor_shift_(x, 31)


def extend_digests(digests: Tensor, token_ids: Tensor) -> Tensor:
    """Return the digests of B prefixes after each is extended by one token. `digests` holds int64
    words [B], and `token_ids` is int64 [B]."""
    return mix64_(digests ^ mix64_(token_ids + _TOKEN_OFFSET))


def noise_keys(
    stream_keys: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return the noise key of each row, int64 words [A], computed on the host."""
    keys = numpy_noise_keys(list(stream_keys), list(positions))
    return torch.from_numpy(keys.view("int64")).to(device)


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """Return the noise bits of each pair of a key and an id, int64 words. `keys` is broadcast with
    `ids`, which are >= SHARED_DRAW_ID."""
    return mix64_(keys + (ids + 1) * _GOLDEN)


def uniform_from_bits(bits: Tensor) -> Tensor:
    """Return uniform variates in (0, 1), float64, bitwise equal to those of
    `outrider.spec.noise`."""
    mantissas = (bits >> 12).bitwise_and_((1 << 52) - 1)
    return mantissas.to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Return finite Gumbel(0, 1) variates, float64."""
    return uniform_from_bits(bits).log_().neg_().log_().neg_()


def perturbed_argmax(scores_AV: Tensor, keys_A: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """Return the column of the largest `score + Gumbel(key, id)` of each row, int64 [A].

    Of equal values the first column wins. `scores_AV` holds float32 log-probs up to a constant,
    without NaN. Excluded columns are -inf, and each row has at least one column that is not.
    `ids_V` holds the int64 id of each column; None means the index of the column. The result of a
    row depends on that row only.
    """
    return perturbed_topk(scores_AV, keys_A, 1, ids_V)[1][:, 0]


def perturbed_topk(
    scores_AV: Tensor, keys_A: Tensor, k: int, ids_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest values of `score + Gumbel(key, id)` of each row, and their columns.

    The values are float64 [A, k], largest first, and the columns are int64 [A, k]. If a row has
    fewer than k finite scores, the remaining values are -inf and the remaining columns are -1.
    Arguments are as for `perturbed_argmax`.
    """
    if scores_AV.device.type == "cpu" and scores_AV.shape[1] > BATCHED_COLUMNS:
        values, chosen = _topk_row_by_row(scores_AV, keys_A, k, ids_V)
    else:
        values, chosen = _topk_batched(scores_AV, keys_A, k, ids_V)
    return values, chosen.masked_fill_(values == -torch.inf, -1)


def _topk_batched(
    scores_AV: Tensor, keys_A: Tensor, k: int, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    columns = scores_AV.shape[1]
    ids = torch.arange(columns, device=scores_AV.device) if ids_V is None else ids_V
    perturbed = gumbel_from_bits(noise_bits(keys_A[:, None], ids[None, :])).add_(scores_AV)
    if k == 1:
        best = perturbed.argmax(dim=-1, keepdim=True)  # unlike max, the first of equal values
        return perturbed.gather(1, best), best
    values, chosen = perturbed.sort(dim=-1, descending=True, stable=True)
    missing = max(k - columns, 0)
    values = torch.nn.functional.pad(values[:, :k], (0, missing), value=-torch.inf)
    return values, torch.nn.functional.pad(chosen[:, :k], (0, missing), value=-1)


def _topk_row_by_row(
    scores_AV: Tensor, keys_A: Tensor, k: int, ids_V: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implement `perturbed_topk` for wide rows on a CPU, with numpy buffers that fit the cache.

    Consecutive rows with equal keys (nodes of one tree level) share their noise. For rows with few
    finite scores (after top-k or top-p), noise is drawn for these columns only.
    """
    columns = scores_AV.shape[1]
    counters = _counters(columns) if ids_V is None else _counters_of(ids_V.numpy())
    scratch = _scratch.take(columns)
    filled: np.uint64 | None = None
    values = np.full((len(keys_A), k), -np.inf)
    chosen = np.full((len(keys_A), k), -1, dtype=np.int64)
    pairs = zip(keys_A.numpy().view(np.uint64), scores_AV.numpy(), strict=True)
    for row, (key, scores) in enumerate(pairs):
        support = np.flatnonzero(scores > -np.inf) if scores.min() == -np.inf else None
        if support is not None and len(support) < columns // 4:
            perturbed = gumbel_from_words(mix64_array(counters[support] + key)) + scores[support]
        else:
            support, perturbed = None, scratch.perturbed
            if filled is None or filled != key:
                _fill_gumbels(key, counters, scratch)
                filled = key
            np.add(scores, scratch.gumbels, out=perturbed)
        best = _best(perturbed, k)
        values[row, : len(best)] = perturbed[best]
        chosen[row, : len(best)] = best if support is None else support[best]
    return torch.from_numpy(values), torch.from_numpy(chosen)


def _best(perturbed: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest values, or of all if there are fewer, largest first."""
    if k == 1 and len(perturbed):
        return np.array([perturbed.argmax()])
    return torch.from_numpy(perturbed).topk(min(k, len(perturbed))).indices.numpy()


def _counters_of(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN64)


@lru_cache(maxsize=16)
def _counters(columns: int) -> NDArray[np.uint64]:
    return _counters_of(np.arange(columns, dtype=np.int64))


class _Buffers(NamedTuple):
    words: NDArray[np.uint64]
    shifted: NDArray[np.uint64]
    gumbels: NDArray[np.float64]
    perturbed: NDArray[np.float64]


class _Scratch(threading.local):
    """Holds reusable buffers per thread, because new buffers cause page faults at every call."""

    def __init__(self) -> None:
        self._held: dict[int, _Buffers] = {}

    def take(self, columns: int) -> _Buffers:
        if columns not in self._held:
            if len(self._held) >= 4:
                self._held.clear()
            words, floats = np.empty((2, columns), np.uint64), np.empty((2, columns))
            self._held[columns] = _Buffers(words[0], words[1], floats[0], floats[1])
        return self._held[columns]


_scratch = _Scratch()


def _fill_gumbels(key: np.uint64, counters: NDArray[np.uint64], scratch: _Buffers) -> None:
    """Write the Gumbel noise of one key to scratch.gumbels, without allocating memory."""
    words, shifted, gumbels = scratch.words, scratch.shifted, scratch.gumbels
    np.add(counters, key, out=words)
    for shift, multiplier in ((30, MULTIPLIER_A), (27, MULTIPLIER_B)):
        np.right_shift(words, np.uint64(shift), out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, np.uint64(multiplier), out=words)
    np.right_shift(words, np.uint64(31), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.right_shift(words, np.uint64(12), out=words)
    np.add(words.view(np.int64), 0.5, out=gumbels)
    np.multiply(gumbels, 2.0**-52, out=gumbels)
    for _ in range(2):
        np.log(gumbels, out=gumbels)
        np.negative(gumbels, out=gumbels)
