"""What the engine thread will own, put together."""

from __future__ import annotations

from collections import Counter

from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from outrider.wire.limits import MAX_SEQUENCE_LEN
from outrider.wire.messages import TensorDtype
from outrider_verifier.config import AUTOMATIC_PLANNER, VerifierConfig
from outrider_verifier.engine.core import Core
from outrider_verifier.engine.round_executor import Rounds
from outrider_verifier.exchange.feature_store import CHUNK, FeatureStore
from outrider_verifier.exchange.proposal_inbox import Inbox
from outrider_verifier.exchange.verdict_builder import Handover
from outrider_verifier.kv.block_manager import GUARD_TOKENS, Room
from outrider_verifier.kv.preemption import Bounds
from outrider_verifier.kv.prefix_cache import Prefixes
from outrider_verifier.model_runner.cpu_runner import Projection, Target
from outrider_verifier.model_runner.interface import RoundRunner
from outrider_verifier.planner.ngram_fallback import StandIns
from outrider_verifier.planner.speculation_policy import Policy
from outrider_verifier.state.effects import Effect
from outrider_verifier.state.preemption_mode import PreemptionMode
from outrider_verifier.state.round_plan import Limits


def assemble(
    config: VerifierConfig,
    target: Target,
    projection: Projection | None,
    runner: RoundRunner,
    pool: KVPool,
    max_context_len: int,
    outbox: list[Effect],
) -> tuple[Core, Rounds]:
    """Everything that the engine thread will own."""
    # A session that waits keeps its proposals, its features and its drafter.
    places = config.max_sessions + config.max_waiting
    store = _store(config, projection, max_sessions=places, block_tokens=pool.block_tokens)
    inbox = Inbox(
        max_sessions=places,
        per_session=config.inbox_per_session,
        # The root's successor stands in any case.
        reach=config.max_tree_nodes + 1,
        budget_bytes=config.inbox_mb << 20,
    )
    counters: Counter[str] = Counter()
    prefixes = _prefixes(config, runner, pool, store, counters)
    automatic = config.planner == AUTOMATIC_PLANNER
    policy = Policy(
        automatic=automatic,
        ceiling_s=config.ceiling_s,
        times=runner.round_s,
        verify_s=runner.verify_s,
        piece_tokens=runner.piece_tokens,
        shares_cores=not config.on_cuda,
    )
    core = Core(
        pool=pool,
        runner=runner,
        inbox=inbox,
        handover=Handover(
            inbox=inbox,
            store=store,
            dtype=config.feature_dtype,
            chunk_tokens=config.prefill_tokens,
            max_sessions=places,
        ),
        store=store,
        vocab_size=target.vocab_size,
        max_context_len=max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_sessions=places,
        policy=policy,
        stand_ins=StandIns(policy.costs, enabled=automatic and config.stand_in),
        room=_room(config, runner, pool, prefixes, counters),
        counters=counters,
        post=outbox.append,
    )
    return core, Rounds(core, runner, _limits(config, runner))


def _limits(config: VerifierConfig, runner: RoundRunner) -> Limits:
    return Limits(
        prefill_tokens=min(config.prefill_tokens, runner.most_prompt_tokens or MAX_SEQUENCE_LEN),
        prefill_beside=runner.prompt_tokens_beside,
        piece_tokens=runner.piece_tokens,
        decode_tokens=config.decode_tokens_per_round,
        gather_s=config.gather_s,
        gather_rounds=config.gather_rounds,
    )


def _store(
    config: VerifierConfig, projection: Projection | None, *, max_sessions: int, block_tokens: int
) -> FeatureStore | None:
    if projection is None:
        return None
    dtype = config.feature_dtype
    return FeatureStore(
        width=projection.hidden_size,
        dtype="uint16" if dtype is TensorDtype.BFLOAT16 else dtype.value,
        budget_bytes=config.feature_budget_mb << 20,
        max_sessions=max_sessions,
        chunk=next(n for n in range(CHUNK, 0, -1) if block_tokens % n == 0),
    )


def _prefixes(
    config: VerifierConfig,
    runner: RoundRunner,
    pool: KVPool,
    store: FeatureStore | None,
    counters: Counter[str],
) -> Prefixes | None:
    if not config.prefix_cache:
        return None
    return Prefixes(
        pool,
        store=store,
        drafted=runner.drafted,
        feature_bytes=config.feature_budget_mb << 20,
        counters=counters,
    )


def _room(
    config: VerifierConfig,
    runner: RoundRunner,
    pool: KVPool,
    prefixes: Prefixes | None,
    counters: Counter[str],
) -> Room:
    return Room(
        pool=pool,
        runner=runner,
        swap=_swap_space(config, runner, pool),
        bounds=Bounds(
            max_running=config.max_sessions,
            max_preemptions=config.max_preemptions,
            watermark=config.kv_watermark,
            aging_s=config.aging_s,
            guard_blocks=pool.blocks_for(GUARD_TOKENS),
        ),
        way=config.way_back,
        prefixes=prefixes,
        counters=counters,
    )


def _swap_space(config: VerifierConfig, runner: RoundRunner, pool: KVPool) -> SwapSpace | None:
    budget = int(config.swap_space_gb * (1 << 30))
    recompute = config.way_back is PreemptionMode.RECOMPUTE or not config.max_preemptions
    return runner.swap_space(budget, pool) if budget and not recompute else None
