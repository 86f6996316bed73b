"""Any messages in any order: the engine neither breaks nor forgets what a good session needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_drafter.engine import ConnectionClosed
from outrider_drafter.ngram import NgramSource

from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, Plan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import validate_tree
from outrider.wire.messages import (
    PlanChange,
    SessionEnd,
    SessionStart,
    TensorDtype,
    Verdict,
    WireTensor,
)
from tests.unit.drafter.helpers import (
    CHAIN,
    HIDDEN,
    TREE,
    VOCAB,
    Script,
    drain,
    head_source,
    make_engine,
)

NGRAM = Plan(method=DraftMethod.NGRAM, draft_tokens=3)

ids = st.sampled_from([SessionId("a"), SessionId("b"), SessionId("")])
plans = st.sampled_from([CHAIN, TREE, NGRAM, Plan(), Plan(method=DraftMethod.MODEL)])
arrays = st.one_of(
    st.lists(st.integers(-3, VOCAB + 3), max_size=12).map(lambda x: np.array(x, np.int32)),
    st.just(np.zeros((2, 2), np.int32)),
    st.just(np.arange(3, dtype=np.int64)),
)
small = st.integers(-2, 12)
tensors = st.builds(
    lambda rows, width, dtype, tag, fill: WireTensor(
        dtype=tag, data=np.full((rows, width), fill).astype(dtype)
    ),
    st.integers(0, 6),
    st.sampled_from([HIDDEN, HIDDEN - 1, 0]),
    st.sampled_from([np.float32, np.float16, np.uint16, np.int64]),
    st.sampled_from([TensorDtype.FLOAT32, TensorDtype.BFLOAT16, TensorDtype.INT64]),
    st.sampled_from([0.0, 1.0, 60000.0]),
)


def with_its_digest(verdict: Verdict, honest: bool) -> Verdict:
    """The verdict, with the digest that its tokens alone have: right for a session's first one."""
    tokens = [t for t in verdict.tokens.ravel().tolist() if t >= 0]
    digest = extend_digest(EMPTY_DIGEST, tokens)
    return replace(verdict, prefix_digest=digest, start=0) if honest else verdict


random_verdicts = st.builds(
    Verdict,
    session_id=ids,
    epoch=st.integers(0, 1),
    round_id=small,
    start=small,
    tokens=arrays,
    prefix_digest=st.integers(0, 2**64 - 1),
    feature_start=small,
    features=st.none() | tensors,
    draft_wanted=st.booleans(),
)
verdicts = st.builds(with_its_digest, random_verdicts, st.booleans())
starts = st.builds(
    SessionStart,
    session_id=ids,
    epoch=st.integers(0, 1),
    plan=plans,
    sampling=st.just(SamplingParams()),
    max_len=st.sampled_from([0, 1, 16, 4096, 2**40]),
    prompt_len=small,
)
others = st.one_of(
    st.builds(PlanChange, session_id=ids, plan=plans),
    st.builds(SessionEnd, session_id=ids),
    st.just(ConnectionClosed()),
)


@given(st.lists(st.one_of(starts, verdicts, others), max_size=12))
@settings(max_examples=150, deadline=None)
def test_no_message_can_break_the_engine(
    tmp_path_factory: pytest.TempPathFactory, messages: list[object]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "fuzzed-head"
    source = head_source(directory)
    engine = make_engine([source, NgramSource(min_match=1)])
    for message in messages:
        engine.handle(1, message)  # type: ignore[arg-type]
        for proposal in drain(engine):
            validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=256)
    good = Script("good")
    engine.handle(1, good.start(plan=CHAIN))
    engine.handle(1, good.verdict(12))
    assert [p.session_id for p in drain(engine)] == ["good"]
    engine.handle(1, ConnectionClosed())
    assert engine.num_sessions == 0
    assert source.used_rows == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_however_a_prefix_is_cut_into_verdicts_the_draft_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[tuple[int, bool, bool]],
    seed: int,
) -> None:
    directory = tmp_path_factory.getbasetemp() / "cut-head"
    length = sum(size for size, _, _ in cuts) + 2
    engine, script = make_engine([head_source(directory)]), Script(seed=seed, length=80)
    engine.handle(1, script.start(plan=TREE))
    for size, wanted, in_time in cuts:
        engine.handle(1, script.verdict(script.told + size, draft_wanted=wanted))
        if in_time:
            drain(engine)
    engine.handle(1, script.verdict(length))
    (proposal,) = drain(engine)
    whole, script = make_engine([head_source(directory)]), Script(seed=seed, length=80)
    whole.handle(1, script.start(plan=TREE))
    whole.handle(1, script.verdict(length))
    (expected,) = drain(whole)
    assert proposal.tree.tokens.tolist() == expected.tree.tokens.tolist()
    assert proposal.tree.parents.tolist() == expected.tree.parents.tolist()
