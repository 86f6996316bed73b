"""Rounds on a device: the host says which sessions, the device decides which tokens.

Rows of one kind share a launch: rows with drafts of this process's own head, and rows with drafts
from outside (or none). Prompts join one of them as pieces. N nodes of a row's bucket, P rows of a
piece, H feature width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.brake import Brake, LargerModel
from outrider.engine.device.current_device import enter_launching_thread
from outrider.engine.device.device_timeline import Recorder
from outrider.engine.device.drafting.in_process_drafter import OwnHead, OwnShape
from outrider.engine.device.graphs.shapes import (
    PIECE_BUCKETS,
    PIECE_TOKENS,
)
from outrider.engine.device.health import device_works
from outrider.engine.device.round_launcher import DeviceRounds, Launched
from outrider.engine.device.slots.logits_slots import check_banned_first
from outrider.engine.device.slots.session_slots import SessionSlots
from outrider.engine.device.transfer.pinned_memory import pin
from outrider.engine.device.warm_up import warm_up
from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import PathLogprobs
from outrider.engine.swap import SwapSpace
from outrider.engine.target import TargetModel
from outrider.wire.messages import TensorDtype
from outrider_verifier.config import VerifierConfig
from outrider_verifier.exchange.shm_features import Reserve
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.cpu_runner import wire_array
from outrider_verifier.model_runner.gpu_runner.decoded_results import Judged, decoded, read_logprobs
from outrider_verifier.model_runner.gpu_runner.device_slots import Seats
from outrider_verifier.model_runner.gpu_runner.grammar_drafts import (
    Emitted,
    begin_under_masks,
    follow_forms,
    leaves_drafts_out,
)
from outrider_verifier.model_runner.gpu_runner.launch_groups import (
    Chunk,
    DeviceFlight,
    Group,
    add_prompts,
    asked_of,
    group_rows,
)
from outrider_verifier.model_runner.gpu_runner.round_times import RoundTimes
from outrider_verifier.model_runner.gpu_runner.shape_family import family_of
from outrider_verifier.model_runner.interface import Flight, RoundOutcome, RowOutcome
from outrider_verifier.model_runner.kv_headroom import Slack
from outrider_verifier.model_runner.results import is_told
from outrider_verifier.state.session import Session

logger = logging.getLogger(__name__)


class DeviceRoundEngine:
    """A `RoundRunner` over `DeviceRounds`."""

    run_ahead = True

    def __init__(
        self,
        slots: SessionSlots,
        rounds: DeviceRounds,
        *,
        slack: Slack,
        device: torch.device,
        own_head: OwnHead | None,
        feature_dtype: TensorDtype,
        prompt_stretch: float,
        as_of: LargerModel | None = None,
    ) -> None:
        """`as_of`: benchmarks only, whose rounds ours are to last as long as."""
        self._slots = slots
        self.rounds = rounds
        self._own_head = own_head
        self._feature_dtype = feature_dtype
        self._wire_dtype = wire_array(torch.empty(0), feature_dtype).dtype
        self._device = device
        self.slack = slack
        self._seats = Seats(slots, own_head)
        self._as_of = as_of
        self._reserve: Reserve | None = None
        """Places for features; None: there are none."""
        self._asking: set[int] = set()
        """Tickets of sessions that ask for log-probabilities."""
        self._collected = 0.0
        """When the last round had been collected."""
        self._times = RoundTimes(
            rounds.family, drafts_itself=own_head is not None, prompt_stretch=prompt_stretch
        )

    @classmethod
    def build(
        cls,
        config: VerifierConfig,
        target: TargetModel,
        projection: FeatureProjection | None = None,
        head: DraftHead | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> DeviceRoundEngine:
        """The engine of a loaded target; `head` drafts in this process (colocated, fused)."""
        shape = OwnShape(config.draft_length if head is not None else 0, config.draft_topk)
        own_slots = shape.extra_slots if head is not None else 0
        # The host's word on a session may be a round old.
        slack = Slack(config.max_tree_nodes, rounds=2, own_slots=own_slots)
        pool = target.pool
        held = pool.free_blocks * pool.block_tokens
        longest = config.max_context_len or target.config.max_position_embeddings
        max_len = min(longest + slack.most, held)
        slots = SessionSlots(
            pool,
            max_sessions=config.max_sessions,
            max_len=max_len,
            max_nodes=config.max_tree_nodes + 1,
            vocab_size=target.vocab_size,
            device=target.device,
            own_nodes=1 + shape.num_nodes if head is not None else 0,
            graphs=config.cuda_graphs,
        )
        own_head = OwnHead(head, slots, pool, shape=shape, max_len=max_len) if head else None
        rounds = DeviceRounds(
            target,
            slots,
            family_of(
                config,
                own_nodes=0 if own_head is None else 1 + own_head.shape.num_nodes,
                features=projection is not None,
            ),
            projection=projection,
            own_head=own_head,
            fused=config.placement == "fused",
            graphs=config.cuda_graphs,
            simulated_rates=config.simulated_rates or None,
            recorder=recorder,
        )
        return cls(
            slots,
            rounds,
            slack=slack,
            device=target.device,
            own_head=own_head,
            feature_dtype=config.feature_dtype,
            prompt_stretch=config.prompt_stretch,
            as_of=LargerModel.asked(round_ms=config.bench_round_ms, row_us=config.bench_row_us),
        )

    def warm_up(self) -> None:
        """Compile the kernels, capture the graph of every shape of the family and time it: no
        request meets one for the first time."""
        if not self.rounds.graphs.enabled:
            return
        seconds = warm_up(self.rounds, self._device)
        if self._as_of is not None:
            self.rounds.brake = Brake(self._as_of, seconds)
            seconds = self.rounds.brake.times
        self._times.learn(seconds)

    def release(self) -> None:
        """Give back what the engine itself holds of the target's pool."""
        self._slots.release()

    @property
    def drafts_itself(self) -> int:
        """Drafts of a round of the head in this process."""
        return 0 if self._own_head is None else self._own_head.shape.num_nodes

    @property
    def piece_tokens(self) -> int:
        """Prompt tokens of a piece."""
        return PIECE_TOKENS

    @property
    def most_prompt_tokens(self) -> int:
        """Prompt tokens that one round takes."""
        return PIECE_BUCKETS[-1] * PIECE_TOKENS

    def prompt_tokens_beside(self, rows: int, crowded: bool = False) -> int:
        """See `RoundTimes`, as the next two."""
        return self._times.prompt_tokens_beside(rows, crowded)

    def round_s(
        self, rows: int, *, own: bool, pieces: int = 0, featured: bool = False
    ) -> float | None:
        """Seconds of a round without drafts from outside."""
        return self._times.plain_s(rows, own=own, pieces=pieces, featured=featured)

    def verify_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of a round of rows with drafts from outside."""
        return self._times.drafted_s(rows, nodes)

    @property
    def usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return device_works(self._device)

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        enter_launching_thread(self._device)

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """See `RoundRunner`."""
        return self.rounds.makes_features and pin(memory, self._device)

    def land_in(self, reserve: Reserve) -> None:
        """See `RoundRunner`."""
        self._reserve = reserve

    def swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Room for the K/V of the target, and of the head in this process."""
        storages = [pool.storage]
        if self._own_head is not None:
            storages.append(self._own_head.storage)
        return SwapSpace(budget_bytes, storages, block_tokens=pool.block_tokens)

    def open(self, session: Session) -> None:
        """See `RoundRunner`."""
        spec = session.spec
        check_banned_first(spec.stop_token_ids if spec.min_new_tokens else ())
        if spec.top_logprobs is not None:
            self._asking.add(session.ticket)

    def close(self, session: Session) -> None:
        """Take the slot back, or forget the copy."""
        self._asking.discard(session.ticket)
        self._seats.close(session)

    def grown(self, session: Session) -> None:
        """The next submit tells the device, or `tell_grown`."""
        self._seats.grown(session)

    def tell_grown(self) -> None:
        """See `RoundRunner`."""
        self._seats.tell()

    def suspend(self, session: Session, swap: SwapSpace | None) -> bool:
        """See `RoundRunner`."""
        return self._seats.suspend(session, swap)

    def fetch(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._seats.fetch(session)

    def resume(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._seats.resume(session)

    def drafted(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._seats.of(session).whole

    # ---- submitting ----------------------------------------------------------------------------

    def submit(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> DeviceFlight:
        """Launch the round."""
        self._seats.tell()
        seats = self._seats.of_all([row.session for row in verify])
        groups = group_rows(verify, seats, self.rounds.family.most_rows)
        add_prompts(
            groups,
            [(place, row, self._seats.of(row.session)) for place, row in enumerate(prefill)],
            own_head=self._own_head is not None,
            mixes=self.rounds.family.mixes,
        )
        for group in groups:
            prompts = [chunk.row for chunk in group.chunks]
            group.blank = self._seats.note_drafts(group.seats, prompts, own=group.own)
            follow_forms(group, self.rounds.form_drafts)
        submitted = time.perf_counter()
        for part, group in enumerate(groups):
            group.launched = self.rounds.launch(
                group.inputs,
                drafts=group.drafts,
                judge=group.judge,
                features=group.keeps_features,
                pieces=group.pieces,
                asked=asked_of(group) if self._asking else None,
                undrafted=leaves_drafts_out(group),
                part=part,
                place=self._place_of(group) if len(groups) == 1 else None,
            )
        return DeviceFlight(prefill, verify, groups, submitted)

    def _place_of(self, group: Group) -> Callable[[int], NDArray[np.uint8] | None] | None:
        """Where the features of a round of one launch may be put for the drafter that will hear of
        them."""
        if self._reserve is None or not (group.rows and is_told(group.rows[0].session)):
            return None
        group.placed_for = group.link_id
        return None if group.placed_for is None else partial(self._reserve, group.placed_for)

    # ---- collecting ----------------------------------------------------------------------------

    def landed(self, flight: Flight) -> bool:
        """Whether all launches of the round have ended."""
        assert isinstance(flight, DeviceFlight)
        groups = (group.launched for group in flight.groups)
        return all(launched is None or launched.result.arrived for launched in groups)

    def collect(self, flight: Flight) -> RoundOutcome:
        """Wait for the launches, move the host's view on."""
        assert isinstance(flight, DeviceFlight)
        rows = sum(row.num_tokens for row in flight.prefill)
        prompts: list[RowOutcome | None] = [None] * len(flight.prefill)
        judged: list[Judged] = []
        for group in flight.groups:
            assert group.launched is not None
            self._begin_under_masks(group, group.launched)
            rows += len(group.rows) * group.launched.shape.nodes
            told = read_logprobs(group.launched)
            if group.rows:
                judged.append(self._read(group, group.launched, told.rows))
            for chunk in group.chunks:
                outcome = self._read_chunk(chunk, group.launched)
                if told.pieces and outcome.tokens:
                    outcome = outcome._replace(logprobs=told.pieces.get(chunk.last))
                prompts[chunk.place] = outcome
        # A round that was submitted behind another one began when that one ended.
        now = time.perf_counter()
        took, self._collected = now - max(flight.submitted, self._collected), now
        return RoundOutcome(
            prefill=[prompt for prompt in prompts if prompt is not None],
            decoded=decoded(judged, len(flight.verify)),
            rows=rows,
            forward_s=took,
            accept_s=0.0,
            project_s=0.0,
        )

    def _begin_under_masks(self, group: Group, launched: Launched) -> None:
        """Before anything else is done with what a launch emitted: the device has nothing to do."""
        drafts = self.rounds.form_drafts
        if drafts is None or not group.own:
            return
        emitted: list[Emitted] = []
        for place, row in enumerate(group.rows):
            if row.session.constraint is not None and not row.session.ended:
                tokens = launched.emitted(place)
                emitted.append(Emitted(row.session, group.seats[place].slot, tokens))
        for chunk in group.chunks:
            session = chunk.row.session
            if session.constraint is not None and chunk.row.last and not session.ended:
                first = launched.first(chunk.last)
                # Without a token there is nothing to enter; the session is about to fail.
                tokens = [first] if first >= 0 else []
                emitted.append(Emitted(session, chunk.pieces[-1].slot, tokens))
        if emitted:
            begin_under_masks(emitted, drafts, undrafted=launched.undrafted)

    def _read(self, group: Group, launched: Launched, logprobs: dict[int, PathLogprobs]) -> Judged:
        """Outcomes of rows that the device judged."""
        words_of_rows, _ = launched.outcome()
        words = words_of_rows[: len(group.rows)]
        counts = words[:, 0].tolist()
        for row, count in zip(group.rows, counts, strict=True):
            if not row.session.ended:
                row.session.kv.advance(count)
        drafted = self.drafts_itself if group.own else 0
        features = self._wire_features(launched)
        # Features that had to be converted lie elsewhere.
        in_place = launched.in_place and features is launched.read_features()
        return Judged(group, words, counts, features, drafted, logprobs, in_place)

    def _read_chunk(self, chunk: Chunk, launched: Launched) -> RowOutcome:
        """The outcome of prompt tokens that ran as pieces."""
        row, session = chunk.row, chunk.row.session
        if not session.ended:
            session.kv.advance(row.num_tokens)
        features, mine = self._wire_features(launched), None
        if features is not None and session.keeps_features:
            # The pieces of a chunk are full but for the last one, so its rows are neighbours.
            start = launched.shape.rows * launched.shape.nodes + chunk.first * PIECE_TOKENS
            mine = features[start : start + row.num_tokens]
        if not row.last:
            return RowOutcome((), mine)
        first = launched.first(chunk.last)
        return RowOutcome((max(first, 0),), mine, invalid_output=first < 0)

    def _wire_features(self, launched: Launched) -> NDArray[np.generic] | None:
        array = launched.read_features()
        if array is None or array.dtype == self._wire_dtype:
            return array
        assert launched.features is not None
        return wire_array(launched.features.wait(), self._feature_dtype)
