"""Any messages in any order: the engine neither breaks nor forgets what a good session needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import ConnectionClosed

from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import validate_tree
from outrider.wire.messages import (
    FeatureRows,
    PlanChange,
    SessionEnd,
    SessionStart,
    TensorDtype,
    Verdicts,
)
from tests.unit.drafter.helpers import (
    CHAIN,
    HIDDEN,
    TREE,
    VOCAB,
    Script,
    drain,
    handle_of,
    head_source,
    make_engine,
    name_of,
)

NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3)

handles = st.sampled_from([handle_of("a"), handle_of("b"), 2**32 - 1])
plans = st.sampled_from(
    [CHAIN, TREE, NGRAM, SpeculationPlan(), SpeculationPlan(method=DraftMethod.MODEL)]
)
small = st.integers(0, 12) | st.just(2**32 - 1)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdicts:
    """What decoding lets through: lengths agree, and that is all."""
    count = draw(st.integers(1, 3))
    dtype, held = draw(
        st.sampled_from([(TensorDtype.FLOAT32, np.float32), (TensorDtype.BFLOAT16, np.uint16)])
    )
    width = draw(st.sampled_from([HIDDEN, HIDDEN, HIDDEN - 1]))
    token_counts = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    feature_counts = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    ids = draw(st.sampled_from([st.integers(0, VOCAB - 1), st.integers(-3, VOCAB + 3)]))
    total = sum(token_counts)
    tokens = np.array(draw(st.lists(ids, min_size=total, max_size=total)), dtype=np.int32)
    starts = np.array(draw(st.lists(small, min_size=count, max_size=count)))
    digests = draw(st.lists(st.integers(0, 2**64 - 1), min_size=count, max_size=count))
    ends = np.cumsum(token_counts)
    for index in range(count):
        if draw(st.booleans()):
            # Right for a session's first verdict.
            part = tokens[ends[index] - token_counts[index] : ends[index]]
            digests[index] = extend_digest(EMPTY_DIGEST, part.clip(0).tolist())
            starts[index] = 0
    rows, offsets = sum(feature_counts), None
    if draw(st.booleans()):
        # Anywhere, one over the other, or with a gap.
        rows += draw(st.integers(0, 3))
        offsets = np.array([draw(st.integers(0, rows - count)) for count in feature_counts])
    fill = draw(st.sampled_from([0.0, 1.0, 60000.0]))
    features = None
    if rows:
        piece = np.full((rows, width), fill).astype(held)
        features = FeatureRows(dtype=dtype, segments=(piece,))
    return Verdicts(
        handles=np.array(draw(st.lists(handles, min_size=count, max_size=count))),
        starts=starts,
        token_counts=np.array(token_counts),
        tokens=tokens,
        digests=np.array(digests, dtype=np.uint64),
        feature_starts=np.array(draw(st.lists(small, min_size=count, max_size=count))),
        feature_counts=np.array(feature_counts),
        draft_wanted=np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        features=features,
        feature_offsets=None if features is None else offsets,
    )


starts = st.builds(
    SessionStart,
    handle=st.sampled_from([handle_of("a"), handle_of("b"), 2**20 - 1]),
    session_id=st.just(SessionId("s")),
    epoch=st.integers(0, 1),
    plan=plans,
    sampling=st.just(SamplingParams()),
    max_len=st.sampled_from([0, 1, 16, 4096, 2**40]),
    prompt_len=small,
)
others = st.one_of(
    st.builds(PlanChange, handle=handles, plan=plans),
    st.builds(SessionEnd, handle=handles),
    st.just(ConnectionClosed()),
)


@given(st.lists(st.one_of(starts, verdicts(), others), max_size=12))
@settings(max_examples=150)
def test_no_message_can_break_the_engine(
    tmp_path_factory: pytest.TempPathFactory, messages: list[object]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "fuzzed-head"
    source = head_source(directory)
    engine = make_engine([source, NgramProposer(min_match=1)])
    for message in messages:
        engine.handle_message(1, message)  # type: ignore[arg-type]
        for proposal in drain(engine):
            validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=256)
    good = Script("good")
    engine.handle_message(1, good.start(plan=CHAIN))
    engine.handle_message(1, good.verdict(12))
    assert [name_of(p) for p in drain(engine)] == ["good"]
    engine.handle_message(1, ConnectionClosed())
    assert engine.num_sessions == 0
    assert source.used_rows == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 5),
)
@settings(max_examples=40)
def test_however_a_prefix_is_cut_into_verdicts_the_draft_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[tuple[int, bool, bool]],
    seed: int,
) -> None:
    directory = tmp_path_factory.getbasetemp() / "cut-head"
    length = sum(size for size, _, _ in cuts) + 2
    engine, script = make_engine([head_source(directory)]), Script(seed=seed, length=80)
    engine.handle_message(1, script.start(plan=TREE))
    for size, wanted, in_time in cuts:
        engine.handle_message(1, script.verdict(script.told + size, draft_wanted=wanted))
        if in_time:
            drain(engine)
    engine.handle_message(1, script.verdict(length))
    (proposal,) = drain(engine)
    whole, script = make_engine([head_source(directory)]), Script(seed=seed, length=80)
    whole.handle_message(1, script.start(plan=TREE))
    whole.handle_message(1, script.verdict(length))
    (expected,) = drain(whole)
    assert proposal.tree.tokens.tolist() == expected.tree.tokens.tolist()
    assert proposal.tree.parents.tolist() == expected.tree.parents.tolist()
