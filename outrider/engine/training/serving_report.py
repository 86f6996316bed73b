"""Tokens per round of a trained head, simulated with the serving code over greedy answers.

In lock-step every draft is grown from real features up to its root. With look-ahead every round is
assumed to be a hit, so a draft is grown one verdict earlier, from real features up to the previous
root and from the head's own features over the tokens that the verdict accepts. A draft is accepted
if it is the answer's next token.
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
"""Number of answers that are drafted for together."""


class SimulatedVerdict(NamedTuple):
    """Verdict of one simulated round: the path to `node` is accepted and `token` follows."""

    tree: DraftTree
    node: int
    """Last accepted node; ROOT if no node was accepted."""
    accepted_len: int
    token: int


class SimulatedRound(NamedTuple):
    """One round of several answers, with the inputs to examine its drafts again."""

    rows: StableRows
    """Rows that the head computed from target features of these answers."""
    roots: Sequence[int]
    """Index of the stable row that reads each answer's root token."""
    verdicts: Sequence[SimulatedVerdict]
    ended: Sequence[bool]
    """Whether each answer ended with this verdict; its token may then be an accepted node."""


RoundCallback = Callable[[SimulatedRound], None]


class RoundCount(NamedTuple):
    """Rounds of an answer and the tokens that they emitted."""

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
    """Return the number of rounds and emitted tokens of each answer. The first token comes from the
    prefill."""
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
    """Return the verdict on a draft that follows token `root` of a known answer. The last token of
    the answer is not counted as drafted, even if the draft has it."""
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
    """Return the mean tokens per round in lock-step and with look-ahead, and their ratio, by task,
    over all tasks, and by shape.

    Looping answers are left out. `watch` returns the callback for the rounds of a shape in
    lock-step (False) or with look-ahead (True).
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
    """Yield groups of answers of similar length that do not loop, with the tasks of the answers."""
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
