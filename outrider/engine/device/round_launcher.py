"""Launches rounds on the device: verification, acceptance, commit, feature projection and drafting.

A round is one CUDA graph. With fused placement that graph also drafts for the next round. With
colocated placement, and in rounds that only prefill, drafting is a second graph, so that the
results of the round do not wait for it. Prompts run as prefill chunks in the same batch as decoding
sessions. The state that the sessions' next round needs (roots, lengths, in-process drafts) stays on
the device. The next round can therefore be launched before the host has the results of the current
one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.device_timeline import DeviceRecorder
from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.drafting.round_drafter import RoundDrafter
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape
from outrider.engine.device.inputs.distribution_inputs import DistributionInputs
from outrider.engine.device.inputs.prefill_chunks import PrefillChunkInput, PrefillChunkInputs
from outrider.engine.device.inputs.round_inputs import RoundInputs
from outrider.engine.device.inputs.round_rows import RoundRows
from outrider.engine.device.logprobs import LogprobRequest, PendingLogprobs, RoundLogprobs
from outrider.engine.device.round_program import RoundProgram, VerifyOutput
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.device.target_kernels import FastKernels, InvariantKernels
from outrider.engine.device.transfer.buffers import Downloader, PendingDownload
from outrider.engine.heads import FeatureProjection
from outrider.engine.kernels.acceptance.matching import INVALID_OUTPUT
from outrider.engine.target import TargetModel


class LaunchedRound(NamedTuple):
    """A launched round whose results have not arrived."""

    shape: RoundShape
    result: PendingDownload
    features: PendingDownload | None
    """Download of the features; None if no features were requested."""
    logprobs: PendingLogprobs | None = None
    """Download of the log-probabilities; None if none were requested."""
    launched_at: float = 0.0
    """Time at which the launch was complete, in seconds of `time.perf_counter`."""
    is_in_place: bool = False
    """Whether the features are downloaded to the memory that the argument `place` of
    `RoundLauncher.launch_round` returned."""
    is_undrafted: bool = False
    """Whether in-process drafting was postponed, so that `GrammarDraftBuffer.start_drafts` must be
    called."""

    def read_outcome(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Wait for the download, and return the result words [B, 2 + 2N] of the decoding rows and
        the token after each prefill chunk, [Q]. See `VerifyOutput.result`."""
        words: NDArray[np.int32] = self.result.wait_array()  # type: ignore[assignment]
        decoding = self.shape.rows * self.shape.result_words
        return words[:decoding].reshape(-1, self.shape.result_words), words[decoding:]

    def read_tokens(self, row: int) -> list[int]:
        """Wait for the download, and return the tokens that a decoding row emitted. If a row of
        logits was not finite, the placeholder that acceptance put in place of its token is left
        out."""
        words = self.read_outcome()[0][row]
        start, count = 2 + self.shape.nodes, int(words[0])
        if words[1] & INVALID_OUTPUT:
            count -= 1
        tokens: list[int] = words[start : start + count].tolist()
        return tokens

    def read_features(self) -> NDArray[np.generic] | None:
        """Wait for the download, and return the features of all decoding rows of the bucket,
        followed by those of the prefill chunks, or None if no features were requested."""
        return None if self.features is None else self.features.wait_array()

    def read_first_token(self, chunk: int) -> int:
        """Wait for the download, and return the token sampled after a prefill chunk that ends a
        prompt, or -1 if the chunk's last row has no finite logit."""
        return int(self.read_outcome()[1][chunk])


class RoundLauncher:
    """Launches rounds and owns every tensor that a graph reads or writes."""

    def __init__(
        self,
        target: TargetModel,
        slots: DeviceSessionSlots,
        family: ShapeFamily,
        *,
        projection: FeatureProjection | None = None,
        in_process_drafter: RoundDrafter | None = None,
        fused: bool = False,
        graphs: bool = True,
        simulated_acceptance: Sequence[float] | int | None = None,
        batch_invariant: bool = False,
        recorder: DeviceRecorder | None = None,
        after_launch: Callable[[RoundShape], None] | None = None,
    ) -> None:
        """`fused`: whether in-process drafting is part of the graph of a round with decoding
        sessions. `batch_invariant`: whether the target's results for a row must be bit-identical
        whatever other rows are in the batch. `simulated_acceptance`: for simulated
        acceptance, the acceptance probability at each draft position, or the mean number of tokens
        of a round times PERIOD_UNIT (see `accept_matching`); None to accept by the sessions' rules.
        `after_launch`: called after each launch of a round if CUDA graphs are enabled; None to call
        nothing."""
        self._device = target.device
        self._slots = slots
        self.drafter = in_process_drafter
        """Drafter that runs on this device or writes its drafts to it; None if there is none."""
        self.family = family
        self._fused = fused
        self.graphs = GraphCache(target.device, enabled=graphs)
        self.recorder = recorder or DeviceRecorder(target.device, enabled=False)
        self._program = RoundProgram(
            target,
            slots,
            projection=projection,
            in_process_drafter=in_process_drafter,
            simulated_acceptance=simulated_acceptance,
            max_token_rows=max(shape.token_rows for shape in family.all_shapes()),
            kernels=InvariantKernels() if batch_invariant else FastKernels(),
        )
        self._logprobs = RoundLogprobs(self._program, max_rows=slots.padding, device=target.device)
        self._inputs: dict[tuple[int, int], RoundInputs] = {}
        self._distributions = DistributionInputs(max_rows=slots.padding, device=target.device)
        self._chunks: dict[int, PrefillChunkInputs] = {}
        self.downloads = Downloader(target.device)
        """Downloader that copies the results of rounds to the host."""
        self.form_drafts: GrammarDraftBuffer | None = None
        """Drafts of sessions with a grammar; None without an in-process drafter in this process."""
        if isinstance(in_process_drafter, InProcessDrafter):
            self.form_drafts = GrammarDraftBuffer(
                in_process_drafter,
                self.graphs,
                max_sessions=slots.padding,
                vocab_size=target.vocab_size,
            )
        self._after_launch = after_launch

    @property
    def computes_features(self) -> bool:
        """Whether rounds can compute features."""
        return self._program.projects

    def launch_round(
        self,
        rows: RoundRows,
        *,
        drafts: DraftKind,
        judge: AcceptanceMode,
        features: bool,
        in_process_nodes: int = 0,
        chunks: Sequence[PrefillChunkInput] = (),
        asked: LogprobRequest | None = None,
        undrafted: bool = False,
        part: int = 0,
        place: Callable[[int], NDArray[np.uint8] | None] | None = None,
    ) -> LaunchedRound:
        """Launch a round of decoding rows and prefill chunks, without waiting for the device.

        drafts: source of the drafts. judge: acceptance mode. features: whether features are
        requested. in_process_nodes: number of nodes of a row with in-process drafts, including the
        root; 0 to use the first shape of the drafter. asked: requests for log-probabilities, if
        any. undrafted: whether to leave in-process drafting to `GrammarDraftBuffer.start_drafts`,
        if the shape allows it; the caller must then call that function for every row. part: index
        of this launch within its round. place: function that is called with a size in bytes and
        returns pinned memory to which the features are downloaded, or None to use an internal
        buffer; the memory must stay valid as long as the features are used.
        """
        shape = self.family.fit_shape(
            rows=len(rows.slots),
            nodes=in_process_nodes or 1 + rows.max_nodes,
            draft_kind=drafts,
            acceptance_mode=judge,
            has_features=features,
            chunks=len(chunks),
        )
        inputs, added = self._inputs_of(shape)
        if inputs is not None:
            inputs.fill_rows(rows, shape.draft_kind, part)
            if shape.has_distributions:
                inputs.distributions.fill_distributions(
                    rows.distributions or (), shape.rows, shape.nodes, part
                )
        if added is not None:
            added.fill_chunks(chunks)
        endings = [piece.allowed for piece in chunks]
        if rows.allowed_tokens is not None or any(masks is not None for masks in endings):
            self._slots.allowed.fill_masks(rows.allowed_tokens or (), shape.nodes, endings)
        undrafted = undrafted and self._can_be_undrafted(shape)
        alone = undrafted or self._drafts_behind(shape)
        verified = self._verify(shape, inputs, added, alone=alone)
        at = time.perf_counter()
        if self._after_launch is not None and self.graphs.enabled:
            self._after_launch(shape)
        if not features or verified.features is None:
            launched = LaunchedRound(
                shape, self.downloads.start_download(verified.result, part), None, launched_at=at
            )
        else:
            memory = None if place is None else place(verified.features.nbytes)
            result, sent = self.downloads.start_downloads(
                (verified.result, verified.features), part, last_into=memory
            )
            launched = LaunchedRound(
                shape, result, sent, launched_at=at, is_in_place=memory is not None
            )
        if alone:
            self._draft(shape, inputs, added, verified, undrafted=undrafted)
        if undrafted:
            launched = launched._replace(is_undrafted=True)
        if asked is None:
            return launched
        logprobs = self._logprobs.start_logprobs(asked, shape, verified, added, part)
        return launched._replace(logprobs=logprobs)

    def warm_up(self, shape: RoundShape) -> None:
        """Compile the kernels and capture the graphs of a shape of the family, by rounds of padding
        rows."""
        inputs, chunks = self._inputs_of(shape)
        if inputs is not None:
            inputs.fill_rows(RoundRows.of_rows([]), shape.draft_kind)
        if chunks is not None:
            chunks.fill_chunks([])
        alone = self._drafts_behind(shape)
        verified = self._verify(shape, inputs, chunks, alone=alone)
        if alone:
            self._draft(shape, inputs, chunks, verified)
        if self._can_be_undrafted(shape):
            verified = self._verify(shape, inputs, chunks, alone=True)
            self._draft(shape, inputs, chunks, verified, undrafted=True)

    def _inputs_of(self, shape: RoundShape) -> tuple[RoundInputs | None, PrefillChunkInputs | None]:
        """Return the static inputs of a shape's decoding rows and of its prefill chunks; None for a
        part that the shape does not have."""
        inputs, chunks = None, None
        if shape.rows:
            key = (shape.rows, shape.nodes)
            inputs = self._inputs.get(key)
            if inputs is None:
                inputs = self._inputs[key] = RoundInputs(
                    *key, self._distributions, padding=self._slots.padding, device=self._device
                )
        if shape.chunks:
            chunks = self._chunks.get(shape.chunks)
            if chunks is None:
                chunks = self._chunks[shape.chunks] = PrefillChunkInputs(
                    shape.chunks, padding=self._slots.padding, device=self._device
                )
        return inputs, chunks

    def _can_be_undrafted(self, shape: RoundShape) -> bool:
        """Return whether in-process drafting may be postponed until the host has seen the
        outcome."""
        drafts = self.form_drafts
        return shape.can_be_undrafted and drafts is not None and shape.nodes == 1 + drafts.length

    def _drafts_behind(self, shape: RoundShape) -> bool:
        """Return whether in-process drafting is a graph of its own."""
        return shape.draft_kind is DraftKind.IN_PROCESS and not (self._fused and shape.rows)

    def _verify(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        chunks: PrefillChunkInputs | None,
        *,
        alone: bool,
    ) -> VerifyOutput:
        """Run the graph of a round. alone: leave out in-process drafting."""
        record, program = self.recorder, self._program
        if alone or shape.draft_kind is not DraftKind.IN_PROCESS:
            whole = shape.draft_kind is not DraftKind.IN_PROCESS or self._drafts_behind(shape)
            key = shape if whole else ("verify", shape)
            with record.record_span("verify"):
                return self.graphs.run_graph(key, lambda: program.run_verify(shape, inputs, chunks))
        with record.record_span("round"):
            return self.graphs.run_graph(
                shape, lambda: self._verify_and_draft(shape, inputs, chunks)
            )

    def _draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        chunks: PrefillChunkInputs | None,
        verified: VerifyOutput,
        *,
        undrafted: bool = False,
    ) -> None:
        """Run the graph of in-process drafting after a round. undrafted: store the input of
        drafting instead."""
        program = self._program
        name, part = (
            ("catch up", program.store_catch_up) if undrafted else ("draft", program.run_drafts)
        )
        with self.recorder.record_span("draft"):
            self.graphs.run_graph((name, shape), lambda: part(shape, inputs, chunks, verified))

    def _verify_and_draft(
        self, shape: RoundShape, inputs: RoundInputs | None, chunks: PrefillChunkInputs | None
    ) -> VerifyOutput:
        verified = self._program.run_verify(shape, inputs, chunks)
        self._program.run_drafts(shape, inputs, chunks, verified)
        return verified
