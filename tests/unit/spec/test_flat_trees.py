"""Checks over flat arrays say of every tree and distribution what the checks of one say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidMessageError
from outrider.spec.draft_distribution import DraftDistribution, validate_distribution
from outrider.spec.tree import DraftTree, validate_tree
from outrider.wire.rounds import Proposal, Proposals, valid_proposals

VOCAB, MOST = 6, 5
"""Small, so that twins and ids out of range are frequent."""

logprobs = st.sampled_from([0.0, -0.5, -1.0, -2.0, 0.25, float("nan"), -float("inf")])


@st.composite
def any_trees(draw: st.DrawFn) -> DraftTree:
    count = draw(st.integers(0, MOST + 1))
    return DraftTree(
        np.array([draw(st.integers(-1, VOCAB)) for _ in range(count)], dtype=np.int32),
        np.array([draw(st.integers(-2, max(i, 0))) for i in range(count)], dtype=np.int32),
        np.array(sorted((draw(logprobs) for _ in range(count)), reverse=True), dtype=np.float32),
    )


@st.composite
def any_laws(draw: st.DrawFn, tree: DraftTree) -> DraftDistribution:
    sizes = [draw(st.integers(0, 3)) for _ in range(len(tree) + 1)]
    ids: list[int] = []
    for size in sizes:
        part = [draw(st.integers(-1, VOCAB)) for _ in range(size)]
        ids += sorted(part) if draw(st.booleans()) else part
    counts = [draw(st.integers(0, 3)) for _ in ids]
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    return DraftDistribution(offsets, np.array(ids, np.int32), np.array(counts, np.uint16))


@st.composite
def likely_laws(draw: st.DrawFn, tree: DraftTree) -> DraftDistribution:
    """Right but for what chance changes afterwards."""
    slots: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        slots[parent + 1].append(token)
    ids = [token for slot in slots for token in sorted(set(slot))]
    counts = [draw(st.sampled_from([1, 2, 3, 9, 0])) for _ in ids]
    sizes = [len(set(slot)) for slot in slots]
    if ids and draw(st.integers(0, 3)) == 0:
        ids[draw(st.integers(0, len(ids) - 1))] = draw(st.integers(-1, VOCAB))
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    return DraftDistribution(offsets, np.array(ids, np.int32), np.array(counts, np.uint16))


def is_sound(tree: DraftTree, distribution: DraftDistribution | None) -> bool:
    """The judgement of the checks for one tree."""
    try:
        validate_tree(tree, vocab_size=VOCAB, max_nodes=MOST)
        if distribution is not None:
            validate_distribution(distribution, tree, VOCAB)
    except InvalidMessageError:
        return False
    return bool(np.isfinite(tree.logprobs).all())


@settings(max_examples=400)
@given(st.data())
def test_many_trees_and_laws_are_judged_as_one_is(data: st.DataObject) -> None:
    drafts: list[Proposal] = []
    for handle in range(data.draw(st.integers(1, 5))):
        tree = data.draw(any_trees())
        distribution = None
        in_range = bool((tree.parents >= -1).all()) and bool((tree.parents < len(tree)).all())
        if data.draw(st.booleans()) and in_range:
            distribution = data.draw(any_laws(tree) | likely_laws(tree))
        drafts.append(
            Proposal(
                handle=handle, prefix_digest=1, prefix_len=1, tree=tree, distribution=distribution
            )
        )
    found = valid_proposals(Proposals.of_proposals(drafts), vocab_size=VOCAB, max_nodes=MOST)
    assert found.tolist() == [is_sound(draft.tree, draft.distribution) for draft in drafts]


def test_laws_come_back_as_they_were() -> None:
    rng = np.random.default_rng(3)
    drafts = []
    for handle in range(6):
        count = int(rng.integers(0, 5))
        tree = DraftTree.chain(rng.integers(0, 9, count).astype(np.int32))
        sizes = rng.integers(0, 4, count + 1)
        offsets = np.cumsum([0, *sizes]).astype(np.int32)
        total = int(offsets[-1])
        distribution = DraftDistribution(
            offsets, np.arange(total, dtype=np.int32), np.ones(total, np.uint16)
        )
        drafts.append(
            Proposal(
                handle=handle,
                prefix_digest=handle,
                prefix_len=1,
                tree=tree,
                distribution=distribution if handle % 2 else None,
            )
        )
    for ours, theirs in zip(Proposals.of_proposals(drafts).iter_proposals(), drafts, strict=True):
        assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()
        assert (ours.distribution is None) == (theirs.distribution is None)
        if ours.distribution is not None and theirs.distribution is not None:
            assert ours.distribution.offsets.tolist() == theirs.distribution.offsets.tolist()
            assert ours.distribution.ids.tolist() == theirs.distribution.ids.tolist()
