"""Held-out metrics of a head: accuracy by draft step and simulated tokens per round of chains.

The answers must be greedy answers of the target. As long as all earlier draft tokens are correct,
the teacher-forced forward has the same inputs as a drafter. Therefore the accepted length of a
chain from any root is the number of consecutive correct draft tokens from there. The number of
rounds that a server would need for an answer follows from these lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.training.data import (
    PackShape,
    TrainingBatch,
    TrainingSample,
    make_batch,
    pack_rows,
    repeated_share,
)
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.target import TrainingTarget
from outrider.engine.training.unrolled_forward import MAX_STEPS, UnrolledForward, labels_from_ids

DraftHits = NDArray[np.bool_]


@torch.no_grad()
def hits_by_sample(
    target: TrainingTarget, head: TrainableHead, samples: Sequence[TrainingSample], steps: int
) -> dict[int, DraftHits]:
    """Return a dict from the index of each sample to a bool array [steps, len(answer)], which says
    for each draft step and each root in the answer whether the draft token is correct."""
    tokens = 16384 if target.device.type == "cuda" else 2048
    forward = UnrolledForward(head, target.embedding, dtype=target.embedding.dtype)
    row_len = max(len(s) for s in samples)
    longest = max(len(s.answer) for s in samples)
    shape = PackShape(rows=max(1, tokens // row_len), row_len=row_len, selected_len=longest)
    hits: dict[int, DraftHits] = {}
    for batch in _all_batches(samples, shape):
        batch = batch.to(target.device)
        final, taps = target.forward(
            batch.ids_BS, batch.positions_BS, batch.attention_mask(), head.config.tap_layers
        )
        selected = batch.selected_BQ
        chosen = final.gather(1, selected[:, :, None].expand(-1, -1, final.shape[-1]))
        truth = batch.next_ids_BS.gather(1, selected)
        labels = labels_from_ids(head, target.logits(chosen), truth)
        result = forward(batch, taps, labels, steps)
        right = torch.stack(
            [c & v for c, v in zip(result.correct, result.valid, strict=True)]
        ).cpu()
        documents = batch.selected_documents_BQ.cpu()
        for index in sorted(set(documents[documents >= 0].tolist())):
            rows, columns = (documents == index).nonzero(as_tuple=True)
            hits[int(index)] = right[:, rows, columns].numpy()
    return hits


def _all_batches(samples: Sequence[TrainingSample], shape: PackShape) -> Iterator[TrainingBatch]:
    """Yield batches that contain every sample once. The last batch may be incomplete."""
    rows = pack_rows(samples, shape, np.random.default_rng(0))
    for start in range(0, len(rows), shape.rows):
        yield make_batch(samples, rows[start : start + shape.rows], shape)


def tokens_per_round(hits: Sequence[DraftHits], chain: int, *, look_ahead: bool = False) -> float:
    """Return the mean number of tokens per round if whole answers are decoded with greedy chains of
    `chain` draft tokens. hits: for each answer, the array from `hits_by_sample`.

    With look-ahead, a chain is drafted while the previous round runs, so the head reads its own
    features for the tokens of that round. If the round emits n tokens, the first token of the chain
    comes from draft step n, counted from 0. `hits` must then have at least 2 * chain + 1 steps.
    """
    rounds = emitted = 0
    for sample in hits:
        root, last, known = 0, sample.shape[1] - 1, 0
        while root < last:
            right = sample[root - known :, known][:chain]
            step = min(int(right.cumprod().sum()) + 1, last - root)
            known = root if look_ahead else root + step
            root, rounds, emitted = root + step, rounds + 1, emitted + step
    return emitted / max(1, rounds)


def step_accuracies(hits: Sequence[DraftHits]) -> dict[str, list[float]]:
    """Return two lists with one value per draft step: `accuracy`, the share of correct draft
    tokens, and `conditional`, this share among the roots for which all earlier steps are
    correct."""
    steps = len(hits[0])
    plain, given = [], []
    for j in range(steps):
        # A draft of step j from the root at column s predicts column s + j + 1.
        rows = [h[:, : h.shape[1] - j - 1] for h in hits if h.shape[1] > j + 1]
        total = sum(r.shape[1] for r in rows)
        plain.append(sum(int(r[j].sum()) for r in rows) / max(1, total))
        before = sum(int(r[:j].all(axis=0).sum()) for r in rows)
        given.append(sum(int(r[: j + 1].all(axis=0).sum()) for r in rows) / max(1, before))
    return {"accuracy": plain, "conditional": given}


def held_out_report(
    target: TrainingTarget,
    head: TrainableHead,
    tasks: Mapping[str, Sequence[TrainingSample]],
    *,
    steps: int = MAX_STEPS,
    chains: Sequence[int] = (2, 3, 4, 5, 6),
) -> dict[str, Any]:
    """Return a dict from the name of each task, and "all", to its metrics, with and without looping
    answers. tasks: greedy answers of each task. Look-ahead is reported for the chain lengths for
    which `steps` suffices (see `tokens_per_round`)."""
    per_task: dict[str, list[tuple[DraftHits, bool]]] = {}
    for task, samples in tasks.items():
        usable = [s for s in samples if len(s.answer) >= 2]
        if usable:
            hits = hits_by_sample(target, head, usable, steps)
            per_task[task] = [
                (hits[i], repeated_share(s.answer) > 0.5) for i, s in enumerate(usable)
            ]
    every = [entry for entries in per_task.values() for entry in entries]
    named = {**per_task, "all": every}
    return {name: _figures(entries, chains) for name, entries in named.items() if entries}


def _figures(entries: Sequence[tuple[DraftHits, bool]], chains: Sequence[int]) -> dict[str, Any]:
    clean = [hits for hits, loops in entries if not loops]
    everything = [hits for hits, _ in entries]
    result: dict[str, Any] = {"answers": len(everything), "loops": len(everything) - len(clean)}
    for name, hits in (("loops_excluded", clean), ("loops_included", everything)):
        if hits:
            steps = len(hits[0])
            result[name] = {
                "tokens_per_round": {str(k): tokens_per_round(hits, k) for k in chains},
                "look_ahead_tokens_per_round": {
                    str(k): tokens_per_round(hits, k, look_ahead=True)
                    for k in chains
                    if 2 * k < steps
                },
                **step_accuracies(hits),
            }
    return result
