"""GpuModelRunner: runs rounds on the GPU, including acceptance and sampling.

The host decides only which sessions are in a round. Rows with in-process drafts share one launch;
rows with proposals or without drafts share another. Prefill chunks join one of these launches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.current_device import init_launching_thread, is_device_usable
from outrider.engine.device.device_timeline import DeviceRecorder
from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter, InProcessDraftShape
from outrider.engine.device.exchange.layout import ExchangeShape, distribution_entries
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import (
    CHUNK_TOKENS,
    AcceptanceMode,
    DraftKind,
    RoundShape,
)
from outrider.engine.device.round_launcher import LaunchedRound, RoundLauncher
from outrider.engine.device.slots.logits_slots import check_initial_bans
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.device.transfer.pinned_memory import pin_memory
from outrider.engine.device.warm_up import compile_shapes, warm_up_shapes
from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.kernels.acceptance.matching import PERIOD_UNIT
from outrider.engine.kernels.linear.invariant import forbid_split_k
from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import PathLogprobs
from outrider.engine.swap import SwapSpace
from outrider.engine.target import TargetModel
from outrider.wire.messages import TensorDtype
from outrider_verifier.config import VerifierConfig
from outrider_verifier.exchange.shm_features import ShmAllocator
from outrider_verifier.hooks import RoundThrottle
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.cpu_runner import to_wire_array
from outrider_verifier.model_runner.gpu_runner.decoded_results import (
    LaunchResults,
    merge_results,
    read_logprobs,
)
from outrider_verifier.model_runner.gpu_runner.device_slots import DeviceSlotTable
from outrider_verifier.model_runner.gpu_runner.grammar_drafts import (
    GrammarEmission,
    apply_grammars,
    can_skip_drafts,
    start_masked_drafts,
)
from outrider_verifier.model_runner.gpu_runner.launch_groups import (
    GpuInFlightRound,
    LaunchGroup,
    PromptChunk,
    add_prompts,
    group_rows,
    requested_logprobs,
)
from outrider_verifier.model_runner.gpu_runner.round_times import MeasuredRoundTimes
from outrider_verifier.model_runner.gpu_runner.shape_family import shape_family_for
from outrider_verifier.model_runner.interface import (
    DraftShapeTimes,
    RoundHandle,
    RowOutput,
    RunnerOutput,
)
from outrider_verifier.model_runner.kv_headroom import KVHeadroom
from outrider_verifier.model_runner.results import has_drafter_link
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

logger = logging.getLogger(__name__)
_TREE_TOP_K: Final = 4
"""Branching factor of the trees that the planner may use instead of chains."""


class GpuModelRunner:
    """A `ModelRunner` on a GPU. Each round consists of one or several launches of
    `RoundLauncher`."""

    can_run_ahead = True

    def __init__(
        self,
        slots: DeviceSessionSlots,
        rounds: RoundLauncher,
        *,
        slack: KVHeadroom,
        device: torch.device,
        in_process_drafter: InProcessDrafter | None,
        remote_drafter: RemoteDrafter | None = None,
        feature_dtype: TensorDtype,
        throttle: RoundThrottle | None = None,
    ) -> None:
        """Create a runner. `slack` is the number of KV slots that rounds may write in advance.
        `throttle` makes rounds last longer, for tests; None adds no delay."""
        self._slots = slots
        self.rounds = rounds
        self.in_process_drafter = in_process_drafter
        """The in-process drafter; None if there is none."""
        self.remote_drafter = remote_drafter
        """Exchange with a drafter on another GPU; None if the device exchange is off."""
        self._draft_nodes = 0
        """Number of nodes of a row with a draft in the present shape, including the root. The draft
        comes from the in-process drafter or through the device exchange. 0 if there is neither."""
        self._draft_levels = 0
        """Maximum depth of the drafts that `_draft_nodes` counts."""
        self._wanted_nodes = 0
        """Number of nodes of a row in the draft shape that `set_draft_shape` requested, including
        the root; 0 if it was not called."""
        if in_process_drafter is not None:
            self._draft_nodes = 1 + in_process_drafter.shape.num_nodes
            self._draft_levels = max(shape.levels for shape in in_process_drafter.shapes)
        elif remote_drafter is not None:
            self._draft_levels = remote_drafter.exchange_shape.draft_length
            self._draft_nodes = 1 + self._draft_levels
        self._usual_nodes = self._draft_nodes
        """Number of nodes of a row in the default draft shape, including the root."""
        self._feature_dtype = feature_dtype
        self._wire_dtype = to_wire_array(torch.empty(0), feature_dtype).dtype
        self._device = device
        self.slot_headroom = slack
        self.device_slots = DeviceSlotTable(slots, in_process_drafter, remote_drafter)
        """Table of the sessions' device slots."""
        self._throttle = throttle
        self._reserve: ShmAllocator | None = None
        """Function that reserves shared memory for features; None if features are never written
        there."""
        self._asking: set[int] = set()
        """Tickets of sessions that request log-probabilities."""
        self._constrained: set[int] = set()
        """Tickets of sessions with a grammar or a limited set of allowed token ids."""
        self._collected = 0.0
        """Time, on the clock of `time.perf_counter`, at which the last round was collected."""
        self.round_times = MeasuredRoundTimes(rounds.family)
        """Round durations that warm-up measured."""

    @classmethod
    def build(
        cls,
        config: VerifierConfig,
        target: TargetModel,
        projection: FeatureProjection | None = None,
        head: DraftHead | None = None,
        *,
        recorder: DeviceRecorder | None = None,
        throttle: RoundThrottle | None = None,
        exchange_timeout_ms: float = 0.0,
    ) -> GpuModelRunner:
        """Build the runner of a loaded target. `head` is the head of an in-process drafter
        (placement colocated or fused). `throttle` makes rounds last longer, for tests.
        `exchange_timeout_ms` is the time that a round waits for drafts of a drafter on another GPU
        of this host; 0 disables this exchange."""
        is_exchanging = head is None and projection is not None and exchange_timeout_ms > 0.0
        drafts_here = head is not None or is_exchanging
        shape = InProcessDraftShape(
            config.draft_length if drafts_here else 0, config.draft_top_k if head else 1
        )
        shapes = [shape]
        if config.in_process_tree_nodes:
            shapes.append(InProcessDraftShape(config.in_process_tree_nodes, _TREE_TOP_K))
        if config.short_chain_tokens and head:
            shapes.append(InProcessDraftShape(config.short_chain_tokens))
        in_process_slots = max(each.extra_slots for each in shapes) if drafts_here else 0
        # The host's word on a session may be a round old.
        slack = KVHeadroom(config.max_tree_nodes, rounds=2, in_process_slots=in_process_slots)
        pool = target.pool
        held = pool.free_blocks * pool.block_tokens
        longest = config.max_context_len or target.config.max_position_embeddings
        max_len = min(longest + slack.max_slots, held)
        slots = DeviceSessionSlots(
            pool,
            max_sessions=config.max_sessions,
            max_len=max_len,
            max_nodes=config.max_tree_nodes + 1,
            vocab_size=target.vocab_size,
            device=target.device,
            in_process_nodes=1 + max(each.num_nodes for each in shapes) if drafts_here else 0,
            graphs=config.cuda_graphs,
        )
        in_process_drafter = (
            InProcessDrafter(head, slots, pool, shapes=shapes, max_len=max_len) if head else None
        )
        family = shape_family_for(
            config,
            in_process_nodes=1 + shape.num_nodes if drafts_here else 0,
            features=projection is not None,
            remote_distributions=is_exchanging and config.exchange_distribution_ids > 0,
        )
        remote_drafter = None
        if is_exchanging:
            assert projection is not None
            remote_drafter = _remote_drafter(
                config, target, slots, projection, family, timeout_ms=exchange_timeout_ms
            )
        if config.batch_invariant:
            forbid_split_k()
        rounds = RoundLauncher(
            target,
            slots,
            family,
            projection=projection,
            in_process_drafter=in_process_drafter or remote_drafter,
            # A remote drafter's part of a round is two small kernels.
            fused=config.placement == "fused" or is_exchanging,
            graphs=config.cuda_graphs,
            simulated_acceptance=round(config.simulated_length * PERIOD_UNIT)
            or config.simulated_rates
            or None,
            batch_invariant=config.batch_invariant,
            recorder=recorder,
            after_launch=None if throttle is None else throttle.delay_launch,
        )
        return cls(
            slots,
            rounds,
            slack=slack,
            device=target.device,
            in_process_drafter=in_process_drafter,
            remote_drafter=remote_drafter,
            feature_dtype=config.feature_dtype,
            throttle=throttle,
        )

    def compile_kernels(self, check: Callable[[], None] | None = None) -> None:
        """Compile the kernels of all rounds in parallel. The weights are not read, so they may
        still be loading. `check` is called between kernels, and raises an error to stop the
        compilation."""
        compile_shapes(self.rounds, self._device, check)

    def warm_up(self) -> None:
        """Compile the kernels, and capture and time the CUDA graph of every shape. No request then
        waits for compilation or capture. Does nothing without CUDA graphs."""
        if not self.rounds.graphs.enabled:
            return
        seconds: Mapping[RoundShape, float] = warm_up_shapes(self.rounds, self._device)
        if self._throttle is not None:
            seconds = self._throttle.calibrate(seconds)
        self.round_times.set_measurements(seconds)

    def release(self) -> None:
        """Free the KV blocks that the runner has reserved for itself."""
        self._slots.release_padding()

    @property
    def in_process_draft_length(self) -> int:
        """Maximum number of tokens that the in-process drafter drafts for a row in its default
        shape; 0 if there is no such drafter."""
        return 0 if self.in_process_drafter is None else self.in_process_drafter.shape.num_nodes

    @property
    def table_blocks(self) -> int:
        """Number of columns of the block table, which is the maximum number of KV blocks of a
        session."""
        return self._slots.sequence.tables.shape[1]

    def detach_remote_drafter(self) -> None:
        """Record that the drafter on another GPU is gone, and discard its drafts."""
        assert self.remote_drafter is not None
        self.remote_drafter.detach()
        self.device_slots.forget_remote_drafts()

    @property
    def chunk_tokens(self) -> int:
        """Number of prompt tokens of a full prefill chunk."""
        return CHUNK_TOKENS

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens of a round."""
        return self.rounds.family.max_prefill_tokens

    def plain_round_s(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """See `ModelRunner`. In-process drafts are assumed to have the present shape."""
        nodes = self._draft_nodes if own else 0
        return self.round_times.plain_s(rows, own_nodes=nodes, chunks=chunks)

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """See `ModelRunner`."""
        drafter, family = self.in_process_drafter, self.rounds.family
        if self.remote_drafter is not None:
            # Warm-up measures rounds without a drafter, which wait for nobody's drafts.
            num_nodes = [self._usual_nodes]
            num_nodes += [family.short_chain_nodes] if family.allows_short_chains(rows) else []
            return [DraftShapeTimes(each, is_tree=False, seconds=math.nan) for each in num_nodes]
        if drafter is None:
            return ()
        shapes = list[DraftShapeTimes]()
        for shape in drafter.shapes:
            seconds = self.round_times.plain_s(rows, own_nodes=1 + shape.num_nodes)
            if self._is_available(1 + shape.num_nodes, rows) and (
                seconds is not None or shape is drafter.shape
            ):
                shapes.append(
                    DraftShapeTimes(
                        1 + shape.num_nodes, shape.is_tree, math.nan if seconds is None else seconds
                    )
                )
        return shapes

    def set_draft_shape(self, num_nodes: int) -> None:
        """See `ModelRunner`."""
        self._wanted_nodes = num_nodes

    def _is_available(self, num_nodes: int, rows: int) -> bool:
        """Return whether a round of `rows` sessions may use drafts of `num_nodes` nodes, including
        the root."""
        family = self.rounds.family
        if num_nodes == family.short_chain_nodes:
            return family.allows_short_chains(rows)
        return num_nodes == self._usual_nodes or rows <= family.max_in_process_tree_rows

    def _prepare_draft_shape(self, rows: int) -> None:
        """Select the draft shape for a round of `rows` sessions: the requested one if it is
        available, else the default one."""
        wanted, before = self._wanted_nodes, self._draft_nodes
        if not (wanted and before):
            return
        # Sessions in a grammar may sit rounds out: the shape shall not change each time.
        if self._constrained or not self._is_available(wanted, rows):
            wanted = self._usual_nodes
        self._draft_nodes = wanted
        chains = (self._usual_nodes, self.rounds.family.short_chain_nodes)
        if wanted != before and not (wanted in chains and before in chains):
            self.device_slots.forget_in_process_drafts()

    def verify_round_s(self, rows: int, nodes: int) -> float | None:
        """See `ModelRunner`."""
        return self.round_times.drafted_round_s(rows, nodes)

    @property
    def is_usable(self) -> bool:
        """Whether the device still works. Waits until all launches have ended."""
        return is_device_usable(self._device)

    def enter_thread(self) -> None:
        """Prepare the calling thread to run rounds. That thread must call this once."""
        init_launching_thread(self._device)

    def pin_memory(self, memory: NDArray[np.uint8]) -> bool:
        """See `ModelRunner`."""
        return self.rounds.computes_features and pin_memory(memory, self._device)

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """See `ModelRunner`."""
        self._reserve = reserve

    def make_swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Return host memory of `budget_bytes` bytes for the KV of suspended sessions: target KV
        and, with an in-process drafter, draft KV."""
        storages = [pool.storage]
        if self.in_process_drafter is not None:
            storages.append(self.in_process_drafter.storage)
        return SwapSpace(budget_bytes, storages, block_tokens=pool.block_tokens)

    def open_session(self, session: Session) -> None:
        """See `ModelRunner`."""
        spec = session.spec
        check_initial_bans(spec.stop_token_ids if spec.min_new_tokens else ())
        if spec.top_logprobs is not None:
            self._asking.add(session.ticket)
        if session.constraint is not None:
            self._constrained.add(session.ticket)

    def close_session(self, session: Session) -> None:
        """Free the session's device slot; if the session is suspended, drop the copy of its KV in
        host memory."""
        self._asking.discard(session.ticket)
        self._constrained.discard(session.ticket)
        self.device_slots.close_session(session)

    def record_new_blocks(self, session: Session) -> None:
        """Queue the session's new KV blocks, which `upload_new_blocks` or the next `submit_round`
        uploads."""
        self.device_slots.queue_new_blocks(session)

    def upload_new_blocks(self) -> None:
        """See `ModelRunner`."""
        self.device_slots.upload_changes()

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """See `ModelRunner`."""
        return self.device_slots.suspend_session(session, swap)

    def prefetch_session(self, session: Session) -> bool:
        """See `ModelRunner`."""
        return self.device_slots.prefetch_session(session)

    def resume_session(self, session: Session) -> bool:
        """See `ModelRunner`."""
        return self.device_slots.resume_session(session)

    def has_draft_kv(self, session: Session) -> bool:
        """See `ModelRunner`."""
        return self.device_slots.get_slot(session).has_full_draft_kv

    # ---- submitting ----------------------------------------------------------------------------

    def submit_round(
        self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
    ) -> GpuInFlightRound:
        """Submit the launches of a round to the device."""
        self._prepare_draft_shape(len(verify))
        self.device_slots.upload_changes()
        device_slots = self.device_slots.get_slots([row.session for row in verify])
        groups = group_rows(verify, device_slots, self.rounds.family.max_rows)
        add_prompts(
            groups,
            [
                (place, row, self.device_slots.get_slot(row.session))
                for place, row in enumerate(prefill)
            ],
            in_process_drafter=self._draft_nodes > 0,
            mixes=self.rounds.family.allows_prefill,
        )
        for group in groups:
            prompts = [chunk.row for chunk in group.prompts]
            group.undrafted_rows = self.device_slots.record_drafts(
                group.device_slots, prompts, own=group.has_in_process_drafts
            )
            apply_grammars(group, self.rounds.form_drafts)
        submitted = time.perf_counter()
        for part, group in enumerate(groups):
            group.launched = self.rounds.launch_round(
                group.inputs,
                drafts=group.drafts,
                judge=group.acceptance_mode,
                features=group.needs_features,
                in_process_nodes=self._draft_nodes if group.has_in_process_drafts else 0,
                chunks=group.all_chunks,
                asked=requested_logprobs(group, self._draft_levels) if self._asking else None,
                undrafted=can_skip_drafts(group),
                part=part,
                place=self._shm_target_of(group) if len(groups) == 1 else None,
            )
            if self.remote_drafter is not None and group.has_in_process_drafts:
                self.remote_drafter.announce_round(
                    group.launched.shape,
                    rejection=group.acceptance_mode is AcceptanceMode.REJECTION,
                )
        return GpuInFlightRound(prefill, verify, groups, submitted)

    def _shm_target_of(
        self, group: LaunchGroup
    ) -> Callable[[int], NDArray[np.uint8] | None] | None:
        """Return a function that reserves shared memory for the features of the round's only
        launch. Return None if the sessions do not share one drafter, or if that drafter cannot read
        the memory."""
        if self._reserve is None or not (group.rows and has_drafter_link(group.rows[0].session)):
            return None
        group.shm_link_id = group.link_id
        return None if group.shm_link_id is None else partial(self._reserve, group.shm_link_id)

    # ---- collecting ----------------------------------------------------------------------------

    def is_finished(self, flight: RoundHandle) -> bool:
        """Return whether all launches of the round have ended."""
        assert isinstance(flight, GpuInFlightRound)
        groups = (group.launched for group in flight.groups)
        return all(launched is None or launched.result.has_arrived for launched in groups)

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Wait for the launches, update the host's state of the sessions, and return the
        results."""
        assert isinstance(flight, GpuInFlightRound)
        rows = sum(row.num_tokens for row in flight.prefill)
        prompts: list[RowOutput | None] = [None] * len(flight.prefill)
        judged: list[LaunchResults] = []
        for group in flight.groups:
            assert group.launched is not None
            self._begin_under_masks(group, group.launched)
            rows += len(group.rows) * group.launched.shape.nodes
            told = read_logprobs(group.launched)
            if group.rows:
                judged.append(self._read(group, group.launched, told.rows))
            for chunk in group.prompts:
                outcome = self._read_chunk(chunk, group.launched)
                if told.chunks and outcome.tokens:
                    outcome = outcome._replace(logprobs=told.chunks.get(chunk.last_chunk))
                prompts[chunk.round_index] = outcome
        # A round that was submitted behind another one began when that one ended.
        now = time.perf_counter()
        took, self._collected = now - max(flight.submitted, self._collected), now
        return RunnerOutput(
            prefill=[prompt for prompt in prompts if prompt is not None],
            decoded=merge_results(judged, len(flight.verify)),
            rows=rows,
            forward_s=took,
            accept_s=0.0,
            project_s=0.0,
        )

    def _begin_under_masks(self, group: LaunchGroup, launched: LaunchedRound) -> None:
        """Start the drafts of sessions with a grammar now, before the host handles the results of
        the launch, because the device is idle until then."""
        drafts = self.rounds.form_drafts
        if drafts is None or not group.has_in_process_drafts:
            return
        emitted: list[GrammarEmission] = []
        for place, row in enumerate(group.rows):
            if row.session.constraint is not None and row.session.phase is not ENDED:
                tokens = launched.read_tokens(place)
                emitted.append(GrammarEmission(row.session, group.device_slots[place].slot, tokens))
        for chunk in group.prompts:
            session = chunk.row.session
            if session.constraint is not None and chunk.row.last and session.phase is not ENDED:
                first = launched.read_first_token(chunk.last_chunk)
                # Without a token there is nothing to enter; the session is about to fail.
                tokens = [first] if first >= 0 else []
                emitted.append(GrammarEmission(session, chunk.chunks[-1].slot, tokens))
        if emitted:
            start_masked_drafts(emitted, drafts, undrafted=launched.is_undrafted)

    def _read(
        self, group: LaunchGroup, launched: LaunchedRound, logprobs: dict[int, PathLogprobs]
    ) -> LaunchResults:
        """Return the results of the decode rows of a launch."""
        words_of_rows, _ = launched.read_outcome()
        words = words_of_rows[: len(group.rows)]
        counts = words[:, 0].tolist()
        for row, count in zip(group.rows, counts, strict=True):
            if row.session.phase is not ENDED:
                row.session.kv.advance(count)
        drafted = launched.shape.nodes - 1 if group.has_in_process_drafts else 0
        features = self._wire_features(launched)
        # Features that had to be converted lie elsewhere.
        in_place = launched.is_in_place and features is launched.read_features()
        return LaunchResults(group, words, counts, features, drafted, logprobs, in_place)

    def _read_chunk(self, chunk: PromptChunk, launched: LaunchedRound) -> RowOutput:
        """Return the result of a prompt after its prefill chunks were computed."""
        row, session = chunk.row, chunk.row.session
        if session.phase is not ENDED:
            session.kv.advance(row.num_tokens)
        features, mine = self._wire_features(launched), None
        if features is not None and session.keeps_features:
            # The pieces of a chunk are full but for the last one, so its rows are neighbours.
            start = launched.shape.rows * launched.shape.nodes + chunk.first_chunk * CHUNK_TOKENS
            mine = features[start : start + row.num_tokens]
        if not row.last:
            return RowOutput((), mine)
        first = launched.read_first_token(chunk.last_chunk)
        return RowOutput((max(first, 0),), mine, invalid_output=first < 0)

    def _wire_features(self, launched: LaunchedRound) -> NDArray[np.generic] | None:
        array = launched.read_features()
        if array is None or array.dtype == self._wire_dtype:
            return array
        assert launched.features is not None
        return to_wire_array(launched.features.wait_tensor(), self._feature_dtype)


def _remote_drafter(
    config: VerifierConfig,
    target: TargetModel,
    slots: DeviceSessionSlots,
    projection: FeatureProjection,
    family: ShapeFamily,
    *,
    timeout_ms: float,
) -> RemoteDrafter:
    """Return the exchange with a drafter on another GPU. Its buffers are large enough for any round
    of `family`."""
    shapes = [shape for shape in family.all_shapes() if shape.draft_kind is DraftKind.IN_PROCESS]
    num_slots = slots.padding + 1
    shape = ExchangeShape(
        num_slots=num_slots,
        max_rows=max(each.rows + each.chunks for each in shapes),
        draft_length=config.draft_length,
        max_chunks=max(each.chunks for each in shapes),
        chunk_tokens=CHUNK_TOKENS,
        feature_size=projection.hidden_size,
        feature_dtype=target.dtype,
        distribution_entries=distribution_entries(
            config.exchange_distribution_ids, num_slots=num_slots, draft_length=config.draft_length
        ),
        fan_out=config.exchange_fan_out,
        ahead_rows=min(config.exchange_ahead_sessions, config.max_sessions),
    )
    return RemoteDrafter(
        shape,
        vocab_size=target.vocab_size,
        device=target.device,
        timeout_us=int(timeout_ms * 1000),
    )
