"""Tokens per round of a trained head, simulated with the serving code over greedy answers.

In lock-step, every draft is made when the target's features up to its root are known. With
look-ahead, every round is assumed to be a hit (the drafter had guessed its outcome). A draft is
then made one round earlier: the target's features are known only up to the previous root, and the
head reads its own outputs for the tokens of the round between. A draft token is accepted if it is
the answer's next token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.training.data import TrainingSample, repeated_share
from outrider.engine.training.drafting import (
    DraftedRows,
    DraftShape,
    StableRows,
    grow_drafts,
    run_paths,
    stable_rows,
)
from outrider.engine.training.target import TrainingTarget
from outrider.spec.tree import ROOT, DraftTree

_TOGETHER = 64
"""Number of answers that are simulated in one batch."""


class SimulatedVerdict(NamedTuple):
    """Verdict of one simulated round: of the draft `tree`, the `accepted_len` nodes up to `node`
    are accepted, and `token` is the next token of the answer."""

    tree: DraftTree
    node: int
    """Last accepted node; ROOT if no node was accepted."""
    accepted_len: int
    token: int


class SimulatedRound(NamedTuple):
    """One simulated round of several answers, with the inputs to compute its drafts again."""

    rows: StableRows
    """What the head computed from the target's features of these answers."""
    roots: Sequence[int]
    """For each answer, the index of the row in `rows` that reads its root token."""
    verdicts: Sequence[SimulatedVerdict]
    ended: Sequence[bool]
    """Whether each answer ended with this round. If it did, the last token does not count as
    accepted, even if the draft has it (see `accept_draft`)."""


RoundCallback = Callable[[SimulatedRound], None]


class RoundCount(NamedTuple):
    """Number of rounds of an answer, and number of tokens that they emitted."""

    rounds: int
    tokens: int


def simulate_rounds(
    head: DraftHead,
    rows: StableRows,
    samples: Sequence[TrainingSample],
    shape: DraftShape,
    *,
    look_ahead: bool = False,
    watch: RoundCallback | None = None,
) -> list[RoundCount]:
    """Simulate decoding of the samples' answers with drafts of the head. Return the number of
    rounds and emitted tokens of each answer, without its first token, which prefill emits.

    rows: what the head computed from the target's features of these samples. watch: called after
    every round.
    """
    answers = [sample.answer.tolist() for sample in samples]
    starts = [len(sample.prompt) - 1 for sample in samples]
    # Indices in the answers: the root, and the newest token whose features are real.
    roots, known = [0] * len(samples), [0] * len(samples)
    rounds = [0] * len(samples)
    live = [i for i, answer in enumerate(answers) if len(answer) > 1]
    kept, held = rows.select_answers(live), list(live)
    while live:
        if live != held:
            kept, held = kept.select_answers([held.index(i) for i in live]), list(live)
        own = DraftedRows(head, kept, [starts[i] + known[i] for i in live])
        paths = [answers[i][known[i] + 1 : roots[i] + 1] for i in live]
        trees = grow_drafts(own, run_paths(own, paths), shape)
        verdicts = [
            accept_draft(tree, answers[i], roots[i]) for i, tree in zip(live, trees, strict=True)
        ]
        at = [starts[i] + roots[i] for i in live]
        for i, verdict in zip(live, verdicts, strict=True):
            known[i] = roots[i] if look_ahead else roots[i] + verdict.accepted_len + 1
            roots[i] += verdict.accepted_len + 1
            rounds[i] += 1
        ended = [roots[i] == len(answers[i]) - 1 for i in live]
        if watch is not None:
            watch(SimulatedRound(kept, at, verdicts, ended))
        live = [i for i, over in zip(live, ended, strict=True) if not over]
    return [
        RoundCount(count, len(answer) - 1) for count, answer in zip(rounds, answers, strict=True)
    ]


def accept_draft(tree: DraftTree, answer: Sequence[int], root: int) -> SimulatedVerdict:
    """Return the verdict on a draft that follows the token with index `root` of a known answer. The
    last token of the answer never counts as accepted, even if the draft has it."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        )
    }
    node, accepted = ROOT, 0
    while root + accepted + 1 < len(answer) - 1:
        child = children.get((node, answer[root + accepted + 1]))
        if child is None:
            break
        node, accepted = child, accepted + 1
    return SimulatedVerdict(tree, node, accepted, answer[root + accepted + 1])


def serving_report(
    target: TrainingTarget,
    head: DraftHead,
    projection: FeatureProjection,
    tasks: Mapping[str, Sequence[TrainingSample]],
    shapes: Mapping[str, DraftShape],
    watch: Callable[[str, bool], RoundCallback] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Simulate decoding of greedy answers and return the mean number of tokens per round.

    tasks: the answers of each task; looping answers are left out. shapes: the draft shapes, by
    name. The result has, for each task and for "all", and for each name of a shape, `lock_step`,
    `look_ahead` and `stale_over_fresh` (look-ahead divided by lock-step). `watch`, called with the
    name of a shape and whether look-ahead is on, returns a callback for the rounds.
    """
    counts: dict[tuple[str, str, bool], list[RoundCount]] = defaultdict(list)
    for names, samples in _parts(tasks):
        rows = stable_rows(target, head, projection, samples)
        for name, ahead in itertools.product(shapes, (False, True)):
            watching = watch(name, ahead) if watch else None
            found = simulate_rounds(
                head, rows, samples, shapes[name], look_ahead=ahead, watch=watching
            )
            for task, counted in zip(names, found, strict=True):
                counts[task, name, ahead].append(counted)
                counts["all", name, ahead].append(counted)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for task, name, _ in counts:
        fresh, stale = (_mean(counts[task, name, ahead]) for ahead in (False, True))
        report.setdefault(task, {})[name] = {
            "lock_step": fresh,
            "look_ahead": stale,
            "stale_over_fresh": stale / fresh,
        }
    return report


def _parts(
    tasks: Mapping[str, Sequence[TrainingSample]],
) -> Iterator[tuple[Sequence[str], Sequence[TrainingSample]]]:
    """Yield the answers that do not loop, in groups of similar length, each with the list of the
    tasks of its answers."""
    clean = [
        (task, sample)
        for task, samples in tasks.items()
        for sample in samples
        if len(sample.answer) > 1 and repeated_share(sample.answer) <= 0.5
    ]
    clean.sort(key=lambda one: len(one[1]))
    for first in range(0, len(clean), _TOGETHER):
        names, samples = zip(*clean[first : first + _TOGETHER], strict=True)
        yield names, samples


def _mean(counts: Sequence[RoundCount]) -> float:
    return sum(c.tokens for c in counts) / sum(c.rounds for c in counts)
