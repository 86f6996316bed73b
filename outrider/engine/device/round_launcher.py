"""Rounds on the device: verify, accept, commit, project, and draft with a head of this process.

A round is one graph: fused placement adds the drafting of the next round to it, colocated
placement keeps that in a second graph, as do rounds of prompts alone, whose first tokens somebody
waits for. Prompts run in it as pieces, beside the sessions that decode. What the next round of the
same sessions needs (root, lengths, own drafts) stays on the device, so it can be launched before
the host has seen the outcome of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.brake import Brake
from outrider.engine.device.device_timeline import Recorder
from outrider.engine.device.drafting.grammar_drafts import FormDrafts
from outrider.engine.device.drafting.in_process_drafter import OwnHead
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import Drafts, Judge, RoundShape
from outrider.engine.device.inputs.distribution_inputs import LawInputs
from outrider.engine.device.inputs.prefill_chunks import Piece, PieceInputs
from outrider.engine.device.inputs.round_inputs import RoundInputs
from outrider.engine.device.inputs.round_rows import RoundRows
from outrider.engine.device.logprobs import Asked, AskedLogprobs, RoundLogprobs
from outrider.engine.device.round_program import RoundProgram, Verified
from outrider.engine.device.slots.session_slots import SessionSlots
from outrider.engine.device.transfer.buffers import Downloader, Readback
from outrider.engine.heads import FeatureProjection
from outrider.engine.kernels.acceptance.matching import INVALID_OUTPUT
from outrider.engine.target import TargetModel


class Launched(NamedTuple):
    """A round on its way."""

    shape: RoundShape
    result: Readback
    features: Readback | None
    """None where none were asked for."""
    logprobs: AskedLogprobs | None = None
    """The same."""
    at: float = 0.0
    """When the device had all that it computes, on the clock of `time.perf_counter`."""
    in_place: bool = False
    """Whether the features come down where `place` said."""
    undrafted: bool = False
    """Whether own drafts that are due were left to `FormDrafts.begin`."""

    def outcome(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Waits: words [B, 2 + 2N] of the rows that decode, first tokens [Q] of the pieces."""
        words: NDArray[np.int32] = self.result.wait_array()  # type: ignore[assignment]
        decoding = self.shape.rows * self.shape.result_words
        return words[:decoding].reshape(-1, self.shape.result_words), words[decoding:]

    def emitted(self, row: int) -> list[int]:
        """Waits: the tokens of a row that decodes, without the placeholder of a row that has no
        finite logit."""
        words = self.outcome()[0][row]
        start, count = 2 + self.shape.nodes, int(words[0])
        if words[1] & INVALID_OUTPUT:
            count -= 1
        tokens: list[int] = words[start : start + count].tolist()
        return tokens

    def read_features(self) -> NDArray[np.generic] | None:
        """Waits: the features of all rows, those of the bucket, then those of the pieces."""
        return None if self.features is None else self.features.wait_array()

    def first(self, piece: int) -> int:
        """Waits: the token behind a piece with which a prompt ends; -1 if its row has no finite
        logit."""
        return int(self.outcome()[1][piece])


class DeviceRounds:
    """Launches rounds; every tensor that a graph reads or writes lives here."""

    def __init__(
        self,
        target: TargetModel,
        slots: SessionSlots,
        family: ShapeFamily,
        *,
        projection: FeatureProjection | None = None,
        own_head: OwnHead | None = None,
        fused: bool = False,
        graphs: bool = True,
        simulated_rates: Sequence[float] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`simulated_rates`: SIMULATED acceptance, the chance of each draft position."""
        self._device = target.device
        self._slots = slots
        self.family = family
        self._fused = fused
        self.graphs = GraphCache(target.device, enabled=graphs)
        self.recorder = recorder or Recorder(target.device, enabled=False)
        self._program = RoundProgram(
            target,
            slots,
            projection=projection,
            own_head=own_head,
            simulated_rates=simulated_rates,
            max_token_rows=max(shape.token_rows for shape in family.shapes()),
        )
        self._logprobs = RoundLogprobs(self._program, max_rows=slots.padding, device=target.device)
        self._inputs: dict[tuple[int, int], RoundInputs] = {}
        self._laws = LawInputs(max_rows=slots.padding, device=target.device)
        self._pieces: dict[int, PieceInputs] = {}
        self._downloads = Downloader(target.device)
        self.form_drafts: FormDrafts | None = None
        """Of the own head; None without one."""
        if own_head is not None:
            self.form_drafts = FormDrafts(
                own_head, self.graphs, max_sessions=slots.padding, vocab_size=target.vocab_size
            )
        self.brake: Brake | None = None
        """Benchmarks only: what makes rounds last longer."""

    @property
    def makes_features(self) -> bool:
        """Whether any round does."""
        return self._program.projects

    def launch(
        self,
        rows: RoundRows,
        *,
        drafts: Drafts,
        judge: Judge,
        features: bool,
        pieces: Sequence[Piece] = (),
        asked: Asked | None = None,
        undrafted: bool = False,
        part: int = 0,
        place: Callable[[int], NDArray[np.uint8] | None] | None = None,
    ) -> Launched:
        """Start a round of rows of one kind, and of pieces; nothing waits for the device. `asked`:
        whose log-probabilities are wanted, if anybody's. `undrafted`: where own drafts are due and
        the shape allows it, leave them to `FormDrafts.begin`, which must follow for every row.
        `part`: which launch of its round it is. `place`: memory of so many bytes for features to
        come down to, pinned, that stays as long as anybody looks at it; or None."""
        shape = self.family.fit(
            rows=len(rows.slots),
            nodes=1 + rows.most_nodes,
            drafts=drafts,
            judge=judge,
            features=features,
            pieces=len(pieces),
        )
        inputs, added = self._inputs_of(shape)
        if inputs is not None:
            inputs.fill(rows, shape.drafts, part)
            if shape.brings_laws:
                inputs.laws.fill(rows.laws or (), shape.rows, shape.nodes, part)
        if added is not None:
            added.fill(pieces)
        endings = [piece.legal for piece in pieces]
        if rows.legal is not None or any(masks is not None for masks in endings):
            self._slots.legal.fill(rows.legal or (), shape.nodes, endings)
        undrafted = undrafted and shape.can_be_undrafted
        alone = undrafted or self._drafts_behind(shape)
        verified = self._verify(shape, inputs, added, alone=alone)
        at = time.perf_counter()
        if self.brake is not None:
            self.brake.hold(shape)
        if not features or verified.features is None:
            launched = Launched(shape, self._downloads.start(verified.result, part), None, at=at)
        else:
            memory = None if place is None else place(verified.features.nbytes)
            result, sent = self._downloads.start_all(
                (verified.result, verified.features), part, last_into=memory
            )
            launched = Launched(shape, result, sent, at=at, in_place=memory is not None)
        if alone:
            self._draft(shape, inputs, added, verified, undrafted=undrafted)
        if undrafted:
            launched = launched._replace(undrafted=True)
        if asked is None:
            return launched
        logprobs = self._logprobs.start(asked, shape, verified, added, part)
        return launched._replace(logprobs=logprobs)

    def warm_up(self, shape: RoundShape) -> None:
        """Compile and capture a shape of the family: a round of nothing but padding."""
        inputs, pieces = self._inputs_of(shape)
        if inputs is not None:
            inputs.fill(RoundRows.of([]), shape.drafts)
        if pieces is not None:
            pieces.fill([])
        alone = self._drafts_behind(shape)
        verified = self._verify(shape, inputs, pieces, alone=alone)
        if alone:
            self._draft(shape, inputs, pieces, verified)
        if shape.can_be_undrafted:
            verified = self._verify(shape, inputs, pieces, alone=True)
            self._draft(shape, inputs, pieces, verified, undrafted=True)

    def _inputs_of(self, shape: RoundShape) -> tuple[RoundInputs | None, PieceInputs | None]:
        """The static inputs of a shape; None for the part that it does not have."""
        inputs, pieces = None, None
        if shape.rows:
            key = (shape.rows, shape.nodes)
            inputs = self._inputs.get(key)
            if inputs is None:
                inputs = self._inputs[key] = RoundInputs(
                    *key, self._laws, padding=self._slots.padding, device=self._device
                )
        if shape.pieces:
            pieces = self._pieces.get(shape.pieces)
            if pieces is None:
                pieces = self._pieces[shape.pieces] = PieceInputs(
                    shape.pieces, padding=self._slots.padding, device=self._device
                )
        return inputs, pieces

    def _drafts_behind(self, shape: RoundShape) -> bool:
        """Whether own drafts are a graph of their own."""
        return shape.drafts is Drafts.OWN and not (self._fused and shape.rows)

    def _verify(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        pieces: PieceInputs | None,
        *,
        alone: bool,
    ) -> Verified:
        """The graph of a round; alone: own drafts, if there are any, are none of its business."""
        record, program = self.recorder, self._program
        if alone or shape.drafts is not Drafts.OWN:
            whole = shape.drafts is not Drafts.OWN or self._drafts_behind(shape)
            key = shape if whole else ("verify", shape)
            with record.span("verify"):
                return self.graphs.run(key, lambda: program.verify(shape, inputs, pieces))
        with record.span("round"):
            return self.graphs.run(shape, lambda: self._verify_and_draft(shape, inputs, pieces))

    def _draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        pieces: PieceInputs | None,
        verified: Verified,
        *,
        undrafted: bool = False,
    ) -> None:
        """The graph of own drafts behind a round; undrafted: of what they begin from."""
        program = self._program
        name, part = ("catch up", program.catch_up) if undrafted else ("draft", program.draft)
        with self.recorder.span("draft"):
            self.graphs.run((name, shape), lambda: part(shape, inputs, pieces, verified))

    def _verify_and_draft(
        self, shape: RoundShape, inputs: RoundInputs | None, pieces: PieceInputs | None
    ) -> Verified:
        verified = self._program.verify(shape, inputs, pieces)
        self._program.draft(shape, inputs, pieces, verified)
        return verified
