"""The feature store gives back what it was given, within its budget."""

from __future__ import annotations

import numpy as np
from outrider_verifier.exchange.feature_store import FEATURE_BLOCK_TOKENS, FeatureStore

A, B = 3, 0


def rows(count: int, start: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Rows [count, 2] that tell their position."""
    return np.arange(2 * start, 2 * (start + count), dtype=np.float32).reshape(count, 2)


def store(budget_rows: int = 100, slab_rows: int = 1 << 12) -> FeatureStore:
    """A store of float32 rows of width 2."""
    return FeatureStore(
        width=2,
        dtype="float32",
        budget_bytes=8 * budget_rows,
        max_sessions=18,
        slab_bytes=8 * slab_rows,
    )


def test_features_are_read_back_across_appends() -> None:
    kept = store()
    kept.open(A)
    kept.append(A, rows(3))
    kept.append(A, rows(2, 3))
    assert np.array_equal(np.concatenate(kept.read(A, 1, 5)), rows(4, 1))
    assert kept.used_bytes == 40


def test_a_session_past_the_budget_loses_its_features_and_the_others_keep_theirs() -> None:
    kept = store(budget_rows=5)
    kept.open(A)
    kept.open(B)
    kept.append(A, rows(3))
    kept.append(B, rows(3))
    assert kept.is_complete(A)
    assert not kept.is_complete(B)
    kept.append(B, rows(1, 3))
    assert kept.used_bytes == 24


def test_closing_frees_the_bytes_and_may_be_repeated() -> None:
    kept = store()
    kept.open(A)
    kept.append(A, rows(4))
    kept.close(A)
    kept.close(A)
    assert kept.used_bytes == 0
    assert not kept.is_complete(A)


def test_any_part_is_read_back_whatever_the_appends() -> None:
    rng = np.random.default_rng(3)
    kept = store(budget_rows=10_000)
    for session in (A, B, A):
        kept.close(session)
        kept.open(session)
        total = 0
        while total < 5 * FEATURE_BLOCK_TOKENS:
            count = int(rng.integers(1, 2 * FEATURE_BLOCK_TOKENS))
            kept.append(session, rows(count, total))
            total += count
            start, stop = sorted(rng.choice(total + 1, 2, replace=False).tolist())
            some = np.concatenate(kept.read(session, start, stop))
            assert np.array_equal(some, rows(stop - start, start))
            assert np.array_equal(np.concatenate(kept.read(session, 0, total)), rows(total))


def test_memory_is_used_again() -> None:
    kept = store(budget_rows=4 * FEATURE_BLOCK_TOKENS)
    kept.open(A)
    kept.append(A, rows(3 * FEATURE_BLOCK_TOKENS))
    (before,) = kept.read(A, 0, FEATURE_BLOCK_TOKENS)
    kept.close(A)
    kept.open(B)
    kept.append(B, rows(3 * FEATURE_BLOCK_TOKENS))
    assert any(
        np.shares_memory(before, kept.read(B, start, start + FEATURE_BLOCK_TOKENS)[0])
        for start in range(0, 3 * FEATURE_BLOCK_TOKENS, FEATURE_BLOCK_TOKENS)
    )
    kept.append(B, rows(FEATURE_BLOCK_TOKENS, 3 * FEATURE_BLOCK_TOKENS))
    kept.close(B)
    assert kept.used_bytes == 0


def test_rows_of_a_round_are_kept_as_one_by_one() -> None:
    """Sessions come and go, some without features, some gone, in as many slabs as there are."""
    rng = np.random.default_rng(5)
    kept, slow = (
        store(budget_rows=100_000, slab_rows=2 * FEATURE_BLOCK_TOKENS),
        dict[int, list[int]](),
    )
    for _ in range(60):
        handle = int(rng.integers(12))
        if handle in slow:
            kept.close(handle)
            del slow[handle]
        else:
            kept.open(handle)
            slow[handle] = []
        for _ in range(int(rng.integers(1, 40))):
            handles = rng.permutation(14)[: int(rng.integers(0, 14))]
            handles[rng.random(len(handles)) < 0.1] = -1
            values = rng.integers(0, 1000, len(handles))
            block = np.repeat(values, 2).reshape(-1, 2).astype(np.float32)
            kept.append_each(handles.tolist(), block)
            for each, value in zip(handles.tolist(), values.tolist(), strict=True):
                if each in slow:
                    slow[each].append(value)
    assert sum(map(len, slow.values())) > 5 * FEATURE_BLOCK_TOKENS
    assert kept.used_bytes == 8 * sum(map(len, slow.values()))
    for handle, values in slow.items():
        if values:
            assert np.concatenate(kept.read(handle, 0, len(values)))[:, 1].tolist() == values


def test_a_round_past_the_budget_and_sessions_without_features() -> None:
    kept = store(budget_rows=6)
    handles = range(4)
    for handle in range(4):
        kept.open(handle)
    kept.append_each(handles, rows(4))
    kept.append_each(handles, rows(4, 4))
    # The third one does not fit; what it had is free for the fourth.
    assert [kept.is_complete(handle) for handle in range(4)] == [True, True, False, True]
    assert kept.used_bytes == 48
    kept.append_each([17, 0, 1, 3], rows(4, 8))
    assert [kept.is_complete(handle) for handle in range(4)] == [False, True, False, True]
    assert np.array_equal(np.concatenate(kept.read(1, 0, 3)), rows(11)[[1, 5, 10]])


def test_what_is_left_for_later_is_there_for_whoever_looks_and_before_what_comes_behind_it() -> (
    None
):
    kept, done = store(), list[int]()

    def add(start: int) -> None:
        done.append(start)
        kept.append(A, rows(2, start))

    kept.open(A)
    kept.defer(lambda: add(0))
    assert done == [] and kept.used_bytes == 0
    kept.defer(lambda: add(2))
    assert done == [0]
    kept.append(A, rows(1, 4))
    assert done == [0, 2]
    kept.defer(lambda: add(5))
    assert np.array_equal(np.concatenate(kept.read(A, 0, 7)), rows(7))
    kept.defer(lambda: add(7))
    kept.run_deferred()
    kept.run_deferred()
    assert done == [0, 2, 5, 7]


def test_what_is_left_for_sessions_that_end_or_do_without_is_not_kept() -> None:
    kept = store()
    kept.open(A)
    kept.append(A, rows(2))
    kept.defer(lambda: kept.append(A, rows(2, 2)))
    kept.close(A)
    kept.run_deferred()
    assert not kept.is_complete(A) and kept.used_bytes == 0
