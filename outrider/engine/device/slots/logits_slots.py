"""Logits-processor state of each session slot: parameters and counts of emitted tokens.

An entry of a slot is a token id with a logit bias or a ban.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.kernels.session_tensors import (
    PROCESS_BIAS,
    PROCESS_GRAMMAR,
    PROCESS_PENALTIES,
    PROCESS_TRUNCATION,
    LogitsProcessorState,
)
from outrider.engine.logits_processor import has_penalties, has_truncation
from outrider.engine.truncation import min_p_floor
from outrider.errors import InvalidRequestError
from outrider.spec.sampling import MAX_BANNED_IDS, MAX_BIASED_IDS, SamplingParams

MAX_INITIAL_BANS: Final = 256
"""Maximum number of token ids that a session may ban up to a given position, such as stop ids below
a minimum length."""
MAX_ENTRIES: Final = MAX_BANNED_IDS + MAX_BIASED_IDS + MAX_INITIAL_BANS
NO_END: Final = 2**31 - 1
"""End position that marks a ban without end."""
_WORDS: Final = 9
"""Number of int32 words of a slot beside its entries: top-p (2), penalties (3), min-p floor, flags,
top-k, number of entries."""
Ids = Sequence[int] | NDArray[np.integer]


def logits_slot_bytes(num_sessions: int, num_columns: int) -> int:
    """Return the number of bytes of device memory that `LogitsSlots` needs, without its small
    per-slot fields."""
    return (num_sessions + 1) * (4 * num_columns + 12 * MAX_ENTRIES)


def check_initial_bans(ids: Ids) -> None:
    """Raise InvalidRequestError if `ids`, the token ids that are banned up to a given position, are
    more than MAX_INITIAL_BANS."""
    if len(ids) > MAX_INITIAL_BANS:
        raise InvalidRequestError(
            f"at most {MAX_INITIAL_BANS} stop ids can be banned below a minimum length, "
            f"not {len(ids)}",
            reason="INVALID_SAMPLING",
        )


class LogitsSlots:
    """Logits-processor state of all session slots on the device. Changes are written in stream
    order."""

    def __init__(
        self,
        count: int,
        columns: int,
        device: torch.device,
        *,
        draft_columns: Tensor | None = None,
    ) -> None:
        """`count`: number of slots, including the padding slot. `columns`: number of columns of the
        logits. `draft_columns`: int32 [vocabulary size of the target], the column of each target
        id, -1 for ids without a column; None if columns are target ids."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):
            self.state = LogitsProcessorState(
                flags=zeros(count),
                penalties=zeros(count, 3, dtype=torch.float32),
                counts=zeros(count, columns),
                entry_counts=zeros(count),
                entry_columns=zeros(count, MAX_ENTRIES),
                entry_amounts=zeros(count, MAX_ENTRIES, dtype=torch.float32),
                entry_ends=zeros(count, MAX_ENTRIES),
                top_ks=zeros(count),
                top_ps=zeros(count, dtype=torch.float64),
                min_p_floors=zeros(count, dtype=torch.float32),
            )
            self._staged = zeros(_WORDS + 3 * MAX_ENTRIES + 1)
        self.draft_columns = draft_columns
        self._map = None if draft_columns is None else draft_columns.cpu().numpy()
        self._columns, self._device = columns, device
        self._flags = [0] * count

    def has_logits_processing(self, slot: int) -> bool:
        """Return whether the session of the slot uses the logits processor."""
        return self._flags[slot] != 0

    def begin_session(
        self,
        slot: int,
        sampling: SamplingParams,
        *,
        prompt_ids: Ids = (),
        output_ids: Ids = (),
        banned_first: Ids = (),
        banned_until: int = 0,
        allowed_tokens: bool = False,
    ) -> None:
        """Write the state of a slot's new session.

        prompt_ids, output_ids: the session's tokens so far. banned_first: token ids that are banned
        at positions below `banned_until`. allowed_tokens: whether the session has a grammar. Raises
        InvalidRequestError for more banned ids than `check_initial_bans` allows.
        """
        check_initial_bans(banned_first)
        flags = PROCESS_GRAMMAR if allowed_tokens else 0
        if has_penalties(sampling):
            flags |= PROCESS_PENALTIES
        if sampling.temperature > 0.0 and has_truncation(sampling):
            flags |= PROCESS_TRUNCATION
        named = bool(sampling.logit_bias or sampling.banned_ids or len(banned_first))
        if not (flags or named or self._flags[slot]):
            # Most sessions have nothing to write and nothing to reset.
            return
        columns, amounts, ends = self._entries(sampling, banned_first, banned_until)
        flags |= PROCESS_BIAS if len(columns) else 0
        self._flags[slot] = flags
        self._write(slot, sampling, flags, columns, amounts, ends)
        if flags & PROCESS_PENALTIES:
            self.state.counts[slot].zero_()
            self._add([(slot, np.unique(self._columns_of(prompt_ids)))], 1)
            self.count_tokens([slot], [output_ids])

    def count_tokens(self, slots: Sequence[int], tokens: Sequence[Ids]) -> None:
        """Add tokens to the output counts of sessions, which penalties need. `tokens`: the tokens
        to add for each slot. Sessions without penalties are skipped."""
        held = [
            (slot, self._columns_of(ids))
            for slot, ids in zip(slots, tokens, strict=True)
            if self._flags[slot] & PROCESS_PENALTIES
        ]
        self._add(held, 2)

    def _entries(
        self, sampling: SamplingParams, banned_first: Ids, banned_until: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """Return the column, the bias and the end of the ban of every biased or banned id, sorted
        by column."""
        amounts = dict(sampling.logit_bias)
        ends = {int(id_): banned_until for id_ in banned_first}
        ends |= dict.fromkeys(sampling.banned_ids, NO_END)
        ids = np.array(sorted({*amounts, *ends}), dtype=np.int64)
        columns = self._columns_of(ids, keep_length=True)
        order = np.argsort(columns, kind="stable")
        order = order[columns[order] >= 0]
        kept = ids[order].tolist()
        return (
            columns[order],
            np.array([amounts.get(id_, 0.0) for id_ in kept], dtype=np.float32),
            np.array([ends.get(id_, 0) for id_ in kept], dtype=np.int32),
        )

    def _columns_of(self, ids: Ids, *, keep_length: bool = False) -> NDArray[np.int32]:
        """Return the columns of target ids. Ids without a column are left out, or -1 if
        `keep_length` is set."""
        wanted = np.asarray(ids, dtype=np.int64)
        limit = self._columns if self._map is None else len(self._map)
        known = (wanted >= 0) & (wanted < limit)
        columns = np.where(known, wanted, -1)
        if self._map is not None:
            columns = np.where(known, self._map[np.where(known, wanted, 0)], -1)
        columns = columns.astype(np.int32)
        return columns if keep_length else columns[columns >= 0]

    def _write(
        self,
        slot: int,
        sampling: SamplingParams,
        flags: int,
        columns: NDArray[np.int32],
        amounts: NDArray[np.float32],
        ends: NDArray[np.int32],
    ) -> None:
        words: NDArray[np.int32] = np.zeros(_WORDS + 3 * len(columns), dtype=np.int32)
        words[0:2] = np.array([sampling.top_p], dtype=np.float64).view(np.int32)
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        words[2:5] = np.array(penalties, dtype=np.float32).view(np.int32)
        words[5] = np.array([min_p_floor(sampling.min_p)], dtype=np.float32).view(np.int32)[0]
        words[6:9] = (flags, min(sampling.top_k, NO_END), len(columns))
        words[_WORDS:] = np.concatenate((columns, amounts.view(np.int32), ends))
        staged = self._staged[: len(words)]
        upload_int32s(staged, words)
        state, here, count = self.state, slice(slot, slot + 1), len(columns)
        state.top_ps[here].copy_(staged[0:2].view(torch.float64))
        state.penalties[slot].copy_(staged[2:5].view(torch.float32))
        state.min_p_floors[here].copy_(staged[5:6].view(torch.float32))
        state.flags[here].copy_(staged[6:7])
        state.top_ks[here].copy_(staged[7:8])
        state.entry_counts[here].copy_(staged[8:9])
        if count:
            entries = staged[_WORDS:].view(3, count)
            state.entry_columns[slot, :count].copy_(entries[0])
            state.entry_amounts[slot, :count].copy_(entries[1].view(torch.float32))
            state.entry_ends[slot, :count].copy_(entries[2])

    def _add(self, held: Sequence[tuple[int, NDArray[np.int32]]], amount: int) -> None:
        """Add `amount` to the count of each given column of each slot, once per occurrence."""
        count = sum(len(columns) for _, columns in held)
        if not count:
            return
        slots = [np.full(len(columns), slot, dtype=np.int32) for slot, columns in held]
        staged = torch.empty((2, count), dtype=torch.int32, device=self._device)
        upload_int32s(staged.view(-1), *slots, *(columns for _, columns in held))
        places = staged[0].long() * self._columns + staged[1]
        amounts = torch.full_like(staged[0], amount)
        self.state.counts.view(-1).index_add_(0, places, amounts)
