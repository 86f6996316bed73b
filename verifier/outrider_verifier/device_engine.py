"""Rounds on a device: the host says which sessions, the device decides which tokens.

Rows of one kind share a launch: rows with drafts of this process's own head, rows with drafts
from outside (or none), and rows whose acceptance the host decides from the logits. N nodes of a
row's bucket, H feature width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import Acceptance, accept
from outrider.engine.device.buffers import Readback
from outrider.engine.device.current import make_current
from outrider.engine.device.health import device_works
from outrider.engine.device.own_head import OwnHead
from outrider.engine.device.recorder import Recorder
from outrider.engine.device.rounds import DeviceRounds, Launched, RowInput
from outrider.engine.device.shapes import Drafts, Judge, RoundShape, row_buckets
from outrider.engine.device.slots import SessionSlots
from outrider.engine.device.warp_slots import WarpSlots
from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.target import TargetModel
from outrider.errors import InvalidRequestError
from outrider.wire.messages import SessionSpec, TensorDtype
from outrider_verifier.config import VerifierConfig
from outrider_verifier.device_groups import Group, Seat, group_rows, own_drafts
from outrider_verifier.device_prompts import PromptResult, run_prompts
from outrider_verifier.engine import Flight, RoundOutcome, RowOutcome, wire_array
from outrider_verifier.packing import PrefillRow, VerifyRow, accept_row
from outrider_verifier.sessions import Session

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DeviceFlight(Flight):
    """A round on its way."""

    prefill: Sequence[PrefillRow]
    verify: Sequence[VerifyRow]
    groups: list[Group]
    submitted: float
    """On the clock of `time.perf_counter`."""


class DeviceRoundEngine:
    """A `RoundRunner` over `DeviceRounds`."""

    run_ahead = True

    def __init__(
        self,
        target: TargetModel,
        slots: SessionSlots,
        rounds: DeviceRounds,
        *,
        projection: FeatureProjection | None,
        own_head: OwnHead | None,
        feature_dtype: TensorDtype,
    ) -> None:
        self._target = target
        self._slots = slots
        self.rounds = rounds
        self._projection = projection
        self._own_head = own_head
        self._feature_dtype = feature_dtype
        self._wire_dtype = wire_array(torch.empty(0), feature_dtype).dtype
        self._device = target.device
        self._warps = [slots.warp] if own_head is None else [slots.warp, own_head.warp]
        self._seats: dict[int, Seat] = {}
        """By the session's ticket."""
        self._collected = 0.0
        """When the last round had been collected."""

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
        length = config.draft_length if head is not None else 0
        slack = config.max_tree_nodes + 2 * (1 + length)
        pool = target.pool
        held = pool.free_blocks * pool.block_tokens
        longest = config.max_context_len or target.config.max_position_embeddings
        max_len = min(longest + slack, held)
        slots = SessionSlots(
            pool,
            max_sessions=config.max_sessions,
            max_len=max_len,
            max_nodes=config.max_tree_nodes + 1,
            vocab_size=target.vocab_size,
            device=target.device,
        )
        own_head = None
        if head is not None:
            own_head = OwnHead(head, slots, pool, length=length, max_len=max_len)
        rounds = DeviceRounds(
            target,
            slots,
            projection=projection,
            own_head=own_head,
            fused=config.placement == "fused",
            graphs=config.cuda_graphs,
            simulated_rates=config.simulated_rates or None,
            recorder=recorder,
        )
        bfloat16 = config.dtype == "bfloat16"
        return cls(
            target,
            slots,
            rounds,
            projection=projection,
            own_head=own_head,
            feature_dtype=TensorDtype.BFLOAT16 if bfloat16 else TensorDtype.FLOAT32,
        )

    def warm_up(self, max_sessions: int) -> None:
        """Compile the kernels and capture the graphs of plain rounds, and of rounds with own
        drafts, for up to `max_sessions` sessions; others are captured when first met."""
        if not self.rounds.graphs.enabled:
            return
        kinds = [(1, Drafts.NONE)]
        if self._own_head is not None:
            kinds.append((1 + self._own_head.length, Drafts.OWN))
        tapped = self._own_head is None and self._projection is not None
        self.rounds.warm_up(
            [
                RoundShape(
                    rows=rows,
                    nodes=nodes,
                    drafts=drafts,
                    judge=Judge.MATCH,
                    features=tapped or drafts is Drafts.OWN,
                )
                for nodes, drafts in kinds
                for rows in row_buckets(max_sessions)
            ]
        )

    def release(self) -> None:
        """Give back what the engine itself holds of the target's pool."""
        self._slots.release()

    @property
    def drafts_itself(self) -> int:
        """Draft length of the head in this process."""
        return 0 if self._own_head is None else self._own_head.length

    @property
    def extra_slots(self) -> int:
        """Two rounds may be under way when a session ends."""
        return 2 * (1 + self.drafts_itself)

    @property
    def usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return device_works(self._device)

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        make_current(self._device)

    def open(self, session: Session) -> None:
        """Give the session a slot; its K/V blocks are known to the device from here on."""
        slot = self._slots.open(session.kv)
        try:
            warped = [self._begin_warp(warps, slot, session.spec) for warps in self._warps]
        except InvalidRequestError:
            self._slots.close(slot)
            raise
        self._seats[session.ticket] = Seat.of(session, slot, warped=any(warped))
        self._slots.begin(slot, session.kv, session.spec.sampling)

    def _begin_warp(self, warps: WarpSlots, slot: int, spec: SessionSpec) -> bool:
        warps.begin(
            slot,
            spec.sampling,
            prompt_ids=spec.token_ids[: spec.prompt_len],
            output_ids=spec.token_ids[spec.prompt_len :],
            banned_first=spec.stop_token_ids if spec.min_new_tokens else (),
            banned_until=spec.prompt_len + spec.min_new_tokens,
        )
        return warps.warps(slot)

    def close(self, session: Session) -> None:
        """Take the slot back."""
        seat = self._seats.pop(session.ticket, None)
        if seat is not None:
            self._slots.close(seat.slot)

    # ---- submitting ----------------------------------------------------------------------------

    def submit(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> DeviceFlight:
        """Launch the verify rows. Prompts are run by `collect`, behind them."""
        groups = group_rows(verify, [self._seats[row.session.ticket] for row in verify])
        for group in groups:
            if not group.own:
                # Whatever the device drafted for these sessions will not follow their prefix.
                for seat in group.seats:
                    seat.drafted = False
        submitted = time.perf_counter()
        for group in groups:
            group.launched = self.rounds.launch(
                [
                    RowInput(seat.slot, None if row.draft is None else row.draft.tree)
                    for row, seat in zip(group.rows, group.seats, strict=True)
                ],
                drafts=group.drafts,
                judge=group.judge,
                features=any(row.session.keeps_features for row in group.rows),
            )
        return DeviceFlight(prefill, verify, groups, submitted)

    # ---- collecting ----------------------------------------------------------------------------

    def collect(self, flight: Flight) -> RoundOutcome:
        """Run the prompts, wait for the launches, move the host's view on."""
        assert isinstance(flight, DeviceFlight)
        rows = sum(row.num_tokens for row in flight.prefill)
        rows += sum(len(group.rows) * _nodes(group) for group in flight.groups)
        prompts = self._run_prompts(flight.prefill) if flight.prefill else []
        outcomes: list[RowOutcome | None] = [None] * len(flight.verify)
        accept_s = 0.0
        for group in flight.groups:
            assert group.launched is not None
            if group.judge is Judge.HOST:
                began = time.perf_counter()
                results = self._judge_on_host(group, group.launched)
                accept_s += time.perf_counter() - began
            else:
                results = self._read(group, group.launched)
            for place, result in zip(group.places, results, strict=True):
                outcomes[place] = result
        # A round that was submitted behind another one began when that one ended.
        now = time.perf_counter()
        took = now - max(flight.submitted, self._collected)
        self._collected = now
        return RoundOutcome(
            prefill=prompts,
            verify=[outcome for outcome in outcomes if outcome is not None],
            rows=rows,
            forward_s=took - accept_s,
            accept_s=accept_s,
            project_s=0.0,
        )

    def _read(self, group: Group, launched: Launched) -> list[RowOutcome]:
        """Outcomes of rows that the device judged."""
        assert launched.result is not None
        nodes = launched.shape.nodes
        results = launched.result.wait_array()[: len(group.rows)].tolist()
        features = None
        if launched.features is not None:
            features = self._wire_features(launched.features)
        drafted = self.drafts_itself if group.own else 0
        outcomes: list[RowOutcome] = []
        for index, (row, words) in enumerate(zip(group.rows, results, strict=True)):
            session, count = row.session, words[0]
            if not session.ended:
                session.kv.advance(count)
            mine = None
            if features is not None and session.keeps_features:
                first = index * nodes
                # Copied: the memory belongs to a later round soon.
                mine = features[first : first + count].copy()
            acceptance = Acceptance(
                accepted_nodes=tuple([kept - 1 for kept in words[3 : 2 + count]]),
                tokens=tuple(words[2 + nodes : 2 + nodes + count]),
                resampled=bool(words[1]),
                used_target_only_fallback=False,
            )
            outcomes.append(RowOutcome(acceptance=acceptance, features=mine, drafted=drafted))
        return outcomes

    def _wire_features(self, features: Readback) -> NDArray[np.generic]:
        array = features.wait_array()
        if array.dtype == self._wire_dtype:
            return array
        return wire_array(features.wait(), self._feature_dtype)

    @torch.inference_mode()
    def _judge_on_host(self, group: Group, launched: Launched) -> list[RowOutcome]:
        """Outcomes of rows whose law the device does not know."""
        nodes = launched.shape.nodes
        drafts = [row.draft for row in group.rows]
        if group.own:
            drafts = own_drafts(group.rows, launched.verified.result.cpu().view(-1, nodes))
        judged = [
            accept_row(row.session, index * nodes, draft)
            for index, (row, draft) in enumerate(zip(group.rows, drafts, strict=True))
        ]
        accepted = accept(launched.verified.logits, judged)
        outcomes: list[RowOutcome] = []
        for index, (row, acceptance) in enumerate(zip(group.rows, accepted, strict=True)):
            mine = None
            if not row.session.ended:
                mine = self._commit(
                    row.session, acceptance, launched.verified.features, index, nodes
                )
            draft = drafts[index]
            drafted = len(draft.tree) if group.own and draft is not None else 0
            outcomes.append(RowOutcome(acceptance=acceptance, features=mine, drafted=drafted))
        if group.own:
            counts = np.array([len(a.tokens) for a in accepted], dtype=np.int32)
            tokens = np.zeros((len(accepted), nodes), dtype=np.int32)
            for index, acceptance in enumerate(accepted):
                tokens[index, : counts[index]] = acceptance.tokens
            # Laws are kept even so: the device may judge these sessions again next time.
            self.rounds.draft_after(launched, counts, tokens, with_law=not group.plain)
        return outcomes

    def _commit(
        self,
        session: Session,
        acceptance: Acceptance,
        features: Tensor | None,
        index: int,
        nodes: int,
    ) -> NDArray[np.generic] | None:
        """Move a host-judged session on; its features, if it keeps them."""
        rows = [0, *(1 + node for node in acceptance.accepted_nodes)]
        session.kv.keep_written(rows)
        self._set_prefix(session, acceptance.tokens)
        if features is None or not session.keeps_features:
            return None
        places = torch.tensor(rows, device=self._device) + index * nodes
        return wire_array(features[places], self._feature_dtype)

    # ---- prompts -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run_prompts(self, prefill: Sequence[PrefillRow]) -> list[RowOutcome]:
        wanted = any(row.session.own_draft or row.session.keeps_features for row in prefill)
        results = run_prompts(self._target, self._projection if wanted else None, prefill)
        return [self._end_prompt_row(result) for result in results]

    def _end_prompt_row(self, result: PromptResult) -> RowOutcome:
        row, acceptance, features = result.row, result.acceptance, result.features
        session, start = row.session, row.session.kv.len
        session.kv.commit(row.kept)
        if acceptance is not None:
            self._set_prefix(session, acceptance.tokens)
        mine = None
        if features is not None and session.keeps_features:
            mine = wire_array(features, self._feature_dtype)
        if features is not None and session.own_draft and self._own_head is not None:
            # Draft row i pairs the feature of position i with the token after it.
            known = session.tokens[start + 1 : session.length]
            following = acceptance.tokens[-1:] if acceptance is not None else ()
            tokens = np.concatenate((known, np.array(following, dtype=np.int32)))
            seat = self._seats[session.ticket]
            self._own_head.prefill(
                seat.slot,
                tokens[: len(row.token_ids)].astype(np.int32),
                features,
                start=start,
                last=acceptance is not None,
                with_law=seat.warped or not seat.matching,
            )
            seat.drafted = seat.drafted or acceptance is not None
        return RowOutcome(acceptance=acceptance, features=mine)

    # ---- between host and device ---------------------------------------------------------------

    def _set_prefix(self, session: Session, tokens: Sequence[int]) -> None:
        """Tell the device of tokens that the host chose."""
        slot = self._seats[session.ticket].slot
        self._slots.set_prefix(slot, length=session.length + len(tokens), root=tokens[-1])
        for warps in self._warps:
            warps.count([slot], [tokens])


def _nodes(group: Group) -> int:
    return group.launched.shape.nodes if group.launched is not None else 1
