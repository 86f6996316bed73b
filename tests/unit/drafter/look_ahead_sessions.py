"""Sessions whose proposals are scored and branched from, without an engine that chooses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.gpu.shapes import (
    Buckets,
    batch_sizes,
    draft_shapes,
    max_path_rows,
    outcome_batch_sizes,
    scoring_shapes,
)
from outrider_drafter.proposers.interface import (
    LookAheadProposer,
    Outcome,
    OutcomeDrafts,
    PendingProposal,
)
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import FollowedSession

from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import ROOT, DraftTree
from outrider.wire.messages import Proposal, SessionEnd
from tests.unit.drafter.helpers import Script, drain, make_engine, name_of
from tests.unit.drafter.mixed_sessions import MIX

AHEAD = [(replace(plan, look_ahead=1), sampling) for plan, sampling in MIX]
ENDS = [[12 + 2 * i for i in range(len(MIX))], [14 + 2 * i + i % 4 for i in range(len(MIX))]]
"""Two rounds of verdicts: up to where each session of MIX is told."""


@dataclass
class Followed:
    """Sessions that a source follows, and the proposals that it made for them last."""

    engine: DraftEngine
    source: LookAheadProposer
    scripts: list[Script]
    proposals: dict[str, Proposal]

    @classmethod
    def begin(
        cls,
        source: LookAheadProposer,
        mix: Sequence[tuple[SpeculationPlan, SamplingParams]],
        *,
        max_len: int = 512,
    ) -> Followed:
        engine = make_engine([source])
        scripts = [Script(f"s{i}", seed=20 + i) for i in range(len(mix))]
        for script, (plan, sampling) in zip(scripts, mix, strict=True):
            engine.handle_message(1, script.start(plan=plan, sampling=sampling, max_len=max_len))
        return cls(engine, source, scripts, {})

    def tell(self, ends: Sequence[int]) -> None:
        for script, end in zip(self.scripts, ends, strict=True):
            self.engine.handle_message(1, script.verdict(end))
        self.proposals = {name_of(p): p for p in drain(self.engine)}

    def end(self) -> None:
        """Leave nothing in the source."""
        for script in self.scripts:
            self.engine.handle_message(1, SessionEnd(handle=script.handle))

    def session(self, i: int) -> FollowedSession:
        (found,) = [s for s in self.sessions() if s.key.handle == self.scripts[i].handle]
        return found

    def sessions(self) -> list[FollowedSession]:
        return self.engine.sessions_of_connection(1)

    def lives(self, trees: Sequence[DraftTree]) -> list[PendingProposal]:
        return [PendingProposal(self.session(i), tree) for i, tree in enumerate(trees)]

    def trees(self) -> list[DraftTree]:
        return [self.proposals[f"s{i}"].tree for i in range(len(self.scripts))]


def some_outcomes(
    trees: Sequence[DraftTree], candidates: Sequence[NDArray[np.int32]]
) -> list[Outcome]:
    """At the root, an inner node and the last leaf of each: a token that is no child there."""
    outcomes = []
    for live, tree in enumerate(trees):
        for node in sorted({ROOT, len(tree) // 2, len(tree) - 1}):
            children = tree.tokens[tree.parents == node].tolist()
            tokens = [t for t in candidates[live][node + 1].tolist() if t >= 0]
            others = [t for t in tokens if t not in children]
            outcomes += [Outcome(live, node, token) for token in others[:2]]
    return outcomes


def launches(monkeypatch: pytest.MonkeyPatch) -> set[Hashable]:
    """The keys of all graphs from now on."""
    launched: set[Hashable] = set()
    run = GraphCache.run_graph

    def noted(self: GraphCache, key: Hashable, fn: Callable[[], object]) -> object:
        launched.add(key)
        return run(self, key, fn)

    monkeypatch.setattr(GraphCache, "run_graph", noted)
    return launched


def look_ahead(
    source: LookAheadProposer, mix: Sequence[tuple[SpeculationPlan, SamplingParams]]
) -> None:
    """Draft, score and branch for sessions, twice."""
    followed = Followed.begin(source, mix)
    for ends in ENDS:
        followed.tell(ends)
        trees = followed.trees()
        scored = source.score_proposals(followed.lives(trees))
        made(source.draft_outcomes(some_outcomes(trees, scored.tokens)))


def assert_captured(launched: set[Hashable], buckets: Buckets) -> None:
    """Each of these is captured at the start of a drafter with such buckets."""
    drafts, branches = draft_shapes(buckets.chains), draft_shapes(buckets.chains, branches=True)
    captured = {
        *(
            (shape, size, rows, general)
            for shape, general in drafts
            for size in batch_sizes(shape, buckets.sessions)
            for rows in buckets.rows
        ),
        *(
            ("branch", shape, size, max_path_rows(shape, buckets.path_rows), general)
            for shape, general in branches
            for size in outcome_batch_sizes(shape)
        ),
        *(
            ("score", nodes, size, rows, warps)
            for nodes, warps in scoring_shapes()
            for size in nodes.batch_buckets
            for rows in buckets.score_rows
        ),
    }
    ours = {key for key in launched if isinstance(key, tuple) and key[0] != "write"}
    assert ours <= captured, ours - captured
    assert {key[0] if isinstance(key[0], str) else "draft" for key in ours} == {
        "draft",
        "branch",
        "score",
    }


@dataclass
class Made:
    """One branch."""

    tree: DraftTree
    law: DraftDistribution | None


def made(parts: Iterator[OutcomeDrafts]) -> dict[int, Made]:
    found: dict[int, Made] = {}
    for branches in parts:
        ends = branches.node_counts.cumsum().tolist()
        distributions = iter([] if branches.distributions is None else laws_of(branches))
        for row, (outcome, begin, end) in enumerate(
            zip(branches.outcomes.tolist(), [0, *ends], ends, strict=False)
        ):
            here = slice(begin, end)
            tree = DraftTree(
                branches.tokens[here].copy(),
                branches.parents[here].copy(),
                branches.logprobs[here].copy(),
            )
            given = branches.distributions is not None and bool(
                branches.distributions.has_distribution[row]
            )
            assert outcome not in found, "an outcome is drafted for once"
            found[outcome] = Made(tree, next(distributions) if given else None)
    return found


def laws_of(branches: OutcomeDrafts) -> list[DraftDistribution]:
    assert branches.distributions is not None
    sizes = iter(branches.distributions.sizes.tolist())
    first, distributions = 0, []
    for row in np.flatnonzero(branches.distributions.has_distribution).tolist():
        own = [next(sizes) for _ in range(int(branches.node_counts[row]) + 1)]
        end = first + sum(own)
        offsets = np.cumsum([0, *own]).astype(np.int32)
        distributions.append(
            DraftDistribution(
                offsets=offsets,
                ids=branches.distributions.ids[first:end],
                counts=branches.distributions.counts[first:end],
            )
        )
        first = end
    return distributions


def assert_same(ours: Made, theirs: Made, *, counts: int = 1) -> None:
    """counts: by how much a count of a distribution may differ."""
    assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()
    assert ours.tree.parents.tolist() == theirs.tree.parents.tolist()
    assert (ours.law is None) == (theirs.law is None)
    if ours.law is not None and theirs.law is not None:
        np.testing.assert_array_equal(ours.law.ids, theirs.law.ids)
        np.testing.assert_allclose(
            ours.law.counts.astype(np.int64), theirs.law.counts.astype(np.int64), atol=counts
        )
