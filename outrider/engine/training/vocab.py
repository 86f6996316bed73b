"""The draft vocabulary: the target ids seen most often in answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.training.data import Ids


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Sorted target ids of the draft vocabulary, and the share of answer tokens they cover."""

    target_ids: NDArray[np.int64]
    coverage: float


def build_vocabulary(
    answers: Iterable[Ids], vocab_size: int, draft_size: int, always: Sequence[int] = ()
) -> DraftVocabulary:
    """The `draft_size` ids counted most often; `always` come first, low ids fill up."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for answer in answers:
        counts += np.bincount(answer, minlength=vocab_size)
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    chosen = np.sort(np.argsort(-rank, kind="stable")[:draft_size])
    total = max(1, int(counts.sum()))
    return DraftVocabulary(chosen.astype(np.int64), float(counts[chosen].sum()) / total)
