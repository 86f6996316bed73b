"""Slow, obvious acceptance: one row at a time, dense float64 vectors, no batching, no tricks.

Written from the textbook rules: speculative sampling (Leviathan et al., 2211.17192; Chen et al.,
2302.01318), recursive rejection without replacement (SpecInfer, 2305.09781) and shared-noise
coupling (Daliri, Musco, Suresh, 2408.07978). It uses `outrider.spec.noise` for the random draws, so
its outcomes can be compared one by one with those of the production code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream, gumbel, uniform
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree

Vector = NDArray[np.float64]


def warped_probs(
    logits: Vector,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned_now: Sequence[int] = (),
) -> Vector:
    """The distribution that is sampled, by the definition of each setting (T > 0)."""
    scores = penalised(logits, params, prompt=prompt, output=output, banned_now=banned_now)
    scores = scores / params.temperature
    if 0 < params.top_k < len(scores):
        scores[scores < np.sort(scores)[-params.top_k]] = -np.inf
    probs = softmax(scores)
    keep = np.ones(len(probs), dtype=bool)
    if params.top_p < 1.0:
        heavier = np.array([probs[probs > p].sum() for p in probs])
        keep &= heavier < params.top_p
    if params.min_p > 0.0:
        keep &= probs >= params.min_p * probs.max()
    probs = np.where(keep, probs, 0.0)
    return np.asarray(probs / probs.sum(), dtype=np.float64)


def penalised(
    logits: Vector,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned_now: Sequence[int] = (),
) -> Vector:
    """Repetition, frequency and presence penalties, biases, then bans."""
    scores = np.array(logits, dtype=np.float64)
    for token in {*prompt, *output}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * list(output).count(token)
        scores[token] -= params.presence_penalty
    for token, amount in params.logit_bias:
        scores[token] += amount
    scores[list({*params.banned_ids, *banned_now})] = -np.inf
    return scores


def softmax(scores: Vector) -> Vector:
    """exp(scores) normalised; -inf gives 0."""
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def judge(
    tree: DraftTree,
    distribution: DraftDistribution | None,
    params: SamplingParams,
    position: int,
    probs_of: Callable[[int], Vector],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(accepted nodes, emitted tokens) of one row.

    probs_of(node): target_probs at a node, -1 being the root; for a greedy row anything whose
    largest entry is the largest logit.
    """
    rule = params.effective_rule
    if rule is Rule.REJECTION and distribution is None:
        rule = Rule.TARGET_ONLY
    node, nodes, tokens = -1, list[int](), list[int]()
    while True:
        probs = probs_of(node)
        below = [i for i in range(len(tree)) if tree.parents[i] == node]
        candidates = [(i, int(tree.tokens[i])) for i in below]
        here = position + len(tokens)
        if rule is Rule.REJECTION:
            assert distribution is not None
            taken, final = _rejection(candidates, distribution, node, probs, params.seed, here)
        elif rule is Rule.TARGET_ONLY:
            taken, final = _target_only(candidates, probs, params.seed, here)
        else:
            scores = np.log(probs, where=probs > 0, out=np.full(len(probs), -np.inf))
            if rule is Rule.COUPLED:
                scores = scores + gumbel(
                    params.seed, NoiseStream.TARGET, here, np.arange(len(probs))
                )
            final = int(scores.argmax())
            taken = next((c for c in candidates if c[1] == final), None)
        if taken is None:
            return tuple(nodes), (*tokens, final)
        node = taken[0]
        nodes.append(node)
        tokens.append(taken[1])


def _sample(probs: Vector, seed: int, position: int) -> int:
    noise = gumbel(seed, NoiseStream.RECOVER, position, np.arange(len(probs)))
    scores = np.log(probs, where=probs > 0, out=np.full(len(probs), -np.inf)) + noise
    return int(scores.argmax())


def _rejection(
    candidates: list[tuple[int, int]],
    distribution: DraftDistribution,
    node: int,
    probs: Vector,
    seed: int,
    position: int,
) -> tuple[tuple[int, int] | None, int]:
    target = probs.copy()
    draft = np.zeros(len(probs))
    ids, values = distribution.draft_probs(node + 1)
    draft[ids] = values
    for child in candidates:
        token = child[1]
        if float(uniform(seed, NoiseStream.ACCEPT, position, token)) < target[token] / draft[token]:
            return child, -1
        target = np.maximum(target - draft, 0.0)
        if target.sum() == 0.0:
            target = probs.copy()
            break
        target /= target.sum()
        draft[token] = 0.0
        if draft.sum() > 0:
            draft /= draft.sum()
    return None, _sample(target, seed, position)


def _target_only(
    candidates: list[tuple[int, int]], probs: Vector, seed: int, position: int
) -> tuple[tuple[int, int] | None, int]:
    coin = float(uniform(seed, NoiseStream.ACCEPT, position, SHARED_DRAW_ID))
    mass, target = 0.0, probs.copy()
    for child in candidates:
        mass += probs[child[1]]
        if coin < mass:
            return child, -1
        target[child[1]] = 0.0
    if target.sum() == 0.0:
        target = probs.copy()
    return None, _sample(target, seed, position)
