"""Builds the objects that the engine thread owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from outrider.wire.limits import MAX_MESSAGE_BYTES, MAX_SEQUENCE_LEN
from outrider.wire.messages import SessionSpec, TensorDtype
from outrider_verifier.config import AUTOMATIC_PLANNER, VerifierConfig
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.outbox import Outbox
from outrider_verifier.engine.round_executor import RoundExecutor
from outrider_verifier.exchange.feature_store import FEATURE_BLOCK_TOKENS, FeatureStore
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.verdict_builder import VerdictBuilder
from outrider_verifier.kv.block_manager import GUARD_TOKENS, BlockManager
from outrider_verifier.kv.preemption import PreemptionLimits
from outrider_verifier.kv.prefix_cache import PrefixCache
from outrider_verifier.model_runner.cpu_runner import FeatureProjector, TargetForward
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.preemption_mode import PreemptionMode
from outrider_verifier.state.round_plan import RoundLimits


def build_engine(
    config: VerifierConfig,
    target: TargetForward,
    projection: FeatureProjector | None,
    runner: ModelRunner,
    pool: KVPool,
    max_context_len: int,
    outbox: Outbox,
    remote_draft_length: Callable[[SessionSpec], int] = lambda _: 0,
) -> tuple[EngineCore, RoundExecutor]:
    """Build all objects that the engine thread owns. `remote_draft_length` returns the draft length
    of a session whose drafts come through the device exchange; 0 if they do not."""
    # A session that waits keeps its proposals, its features and its drafter.
    places = config.max_sessions + config.max_waiting
    store = _store(config, projection, max_sessions=places, block_tokens=pool.block_tokens)
    inbox = ProposalInbox(
        max_sessions=places,
        per_session=config.max_proposals_per_session,
        # The root's successor stands in any case.
        reach=config.max_tree_nodes + 1,
        budget_bytes=config.proposal_memory_mb << 20,
    )
    counters: Counter[str] = Counter()
    prefixes = _prefixes(config, runner, pool, store, counters)
    automatic = config.planner == AUTOMATIC_PLANNER
    prefill_tokens = max_round_prompt_tokens(config, projection)
    policy = SpeculationPolicy(
        automatic=automatic,
        ceiling_s=config.max_proposal_wait_s,
        times=runner.plain_round_s,
        draft_shapes=runner.draft_shapes,
        chunk_tokens=runner.chunk_tokens,
        shares_cores=not config.is_on_cuda,
    )
    core = EngineCore(
        pool=pool,
        runner=runner,
        inbox=inbox,
        verdict_builder=VerdictBuilder(
            inbox=inbox,
            store=store,
            dtype=config.feature_dtype,
            chunk_tokens=prefill_tokens,
            max_sessions=places,
        ),
        store=store,
        vocab_size=target.vocab_size,
        max_context_len=max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_sessions=places,
        policy=policy,
        block_manager=_block_manager(config, runner, pool, prefixes, counters),
        counters=counters,
        outbox=outbox,
        remote_draft_length=remote_draft_length,
    )
    return core, RoundExecutor(core, runner, _limits(config, runner, prefill_tokens))


def max_round_prompt_tokens(config: VerifierConfig, projection: FeatureProjector | None) -> int:
    """Return the maximum number of prompt tokens of a round or of a catch-up verdict. The features
    of so many tokens fit half a message."""
    if projection is None:
        return config.resolved_prefill_tokens
    token_bytes = projection.hidden_size * np.dtype(_numpy_name(config.feature_dtype)).itemsize
    return max(1, min(config.resolved_prefill_tokens, MAX_MESSAGE_BYTES // 2 // token_bytes))


def _numpy_name(dtype: TensorDtype) -> str:
    """Return the name of the numpy element type of feature arrays: "uint16" for bfloat16, which
    numpy does not have, else the name of `dtype`."""
    return "uint16" if dtype is TensorDtype.BFLOAT16 else dtype.value


def _limits(config: VerifierConfig, runner: ModelRunner, prefill_tokens: int) -> RoundLimits:
    return RoundLimits(
        prefill_tokens=min(prefill_tokens, runner.max_prompt_tokens or MAX_SEQUENCE_LEN),
        chunk_tokens=runner.chunk_tokens,
        decode_tokens=config.decode_tokens_per_round,
        batch_wait_s=config.batch_wait_s,
        batch_wait_rounds=config.batch_wait_rounds,
    )


def _store(
    config: VerifierConfig,
    projection: FeatureProjector | None,
    *,
    max_sessions: int,
    block_tokens: int,
) -> FeatureStore | None:
    if projection is None:
        return None
    return FeatureStore(
        width=projection.hidden_size,
        dtype=_numpy_name(config.feature_dtype),
        budget_bytes=config.feature_budget_mb << 20,
        max_sessions=max_sessions,
        chunk=next(n for n in range(FEATURE_BLOCK_TOKENS, 0, -1) if block_tokens % n == 0),
    )


def _prefixes(
    config: VerifierConfig,
    runner: ModelRunner,
    pool: KVPool,
    store: FeatureStore | None,
    counters: Counter[str],
) -> PrefixCache | None:
    if not config.prefix_cache:
        return None
    return PrefixCache(
        pool,
        store=store,
        drafted=runner.has_draft_kv,
        feature_bytes=config.feature_budget_mb << 20,
        counters=counters,
        compares_kv=config.check_prefix_kv,
    )


def _block_manager(
    config: VerifierConfig,
    runner: ModelRunner,
    pool: KVPool,
    prefixes: PrefixCache | None,
    counters: Counter[str],
) -> BlockManager:
    return BlockManager(
        pool=pool,
        runner=runner,
        swap=_swap_space(config, runner, pool),
        bounds=PreemptionLimits(
            max_running=config.max_sessions,
            max_preemptions=config.max_preemptions,
            watermark=config.kv_watermark,
            aging_s=config.priority_aging_s,
            guard_blocks=pool.blocks_for(GUARD_TOKENS),
        ),
        way=config.preemption_mode,
        prefixes=prefixes,
        counters=counters,
    )


def _swap_space(config: VerifierConfig, runner: ModelRunner, pool: KVPool) -> SwapSpace | None:
    budget = int(config.swap_space_gb * (1 << 30))
    recompute = config.preemption_mode is PreemptionMode.RECOMPUTE or not config.max_preemptions
    return runner.make_swap_space(budget, pool) if budget and not recompute else None
