"""Draft vocabulary builder: the target ids that are most frequent in answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.training.data import TokenIdArray


@dataclass(frozen=True, slots=True)
class TrainingVocabulary:
    """Sorted target ids of a draft vocabulary, and its coverage: the share of answer tokens that
    are in it."""

    target_ids: NDArray[np.int64]
    coverage: float


def build_vocabulary(
    answers: Iterable[TokenIdArray], vocab_size: int, draft_size: int, always: Sequence[int] = ()
) -> TrainingVocabulary:
    """Return a draft vocabulary of the `draft_size` most frequent ids of the answers. The ids in
    `always` are included first. Of equally frequent ids, the lower ones are included."""
    counts = _count(answers, vocab_size)
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    chosen = np.sort(np.argsort(-rank, kind="stable")[:draft_size])
    return _vocabulary(chosen.astype(np.int64), counts)


def given_vocabulary(
    answers: Iterable[TokenIdArray], vocab_size: int, target_ids: NDArray[np.int64]
) -> TrainingVocabulary:
    """Return the draft vocabulary `target_ids` of an existing head, with its coverage of the
    answers."""
    return _vocabulary(target_ids, _count(answers, vocab_size))


def _count(answers: Iterable[TokenIdArray], vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for answer in answers:
        counts += np.bincount(answer, minlength=vocab_size)
    return counts


def _vocabulary(chosen: NDArray[np.int64], counts: NDArray[np.int64]) -> TrainingVocabulary:
    return TrainingVocabulary(chosen, float(counts[chosen].sum()) / max(1, int(counts.sum())))
