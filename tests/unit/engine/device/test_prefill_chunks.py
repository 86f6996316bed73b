"""Pieces of prompts: cut, described to the device, and what they leave behind."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.device.graphs.shapes import CHUNK_TOKENS
from outrider.engine.device.inputs.prefill_chunks import (
    PrefillChunkInput,
    PrefillChunkInputs,
    cut_chunks,
)
from outrider.engine.device.inputs.round_inputs import NO_TOKEN
from outrider.engine.kernels.session_tensors import SequenceState

CPU = torch.device("cpu")
PADDING = 5


def prompt(length: int) -> np.ndarray:
    """Token ids 100, 101, ..."""
    return np.arange(100, 100 + length, dtype=np.int32)


def test_a_prompt_is_cut_into_full_pieces_and_a_rest() -> None:
    chunks = cut_chunks(3, prompt(2 * CHUNK_TOKENS + 5), 0, 2 * CHUNK_TOKENS + 5)
    assert [(p.slot, p.start, len(p.tokens)) for p in chunks] == [
        (3, 0, CHUNK_TOKENS),
        (3, CHUNK_TOKENS, CHUNK_TOKENS),
        (3, 2 * CHUNK_TOKENS, 5),
    ]
    assert [p.following for p in chunks] == [100 + CHUNK_TOKENS, 100 + 2 * CHUNK_TOKENS, NO_TOKEN]


def test_a_chunk_that_is_not_the_last_knows_the_token_after_it() -> None:
    (chunk,) = cut_chunks(1, prompt(40), 10, 30)
    assert chunk.tokens.tolist() == list(range(110, 130))
    assert chunk.following == 130


def filled(chunks: list[PrefillChunkInput], size: int) -> PrefillChunkInputs:
    """A bucket of `size` that holds these pieces."""
    inputs = PrefillChunkInputs(size, padding=PADDING, device=CPU)
    # What a round before it said must not shine through.
    inputs.fill_chunks(cut_chunks(0, prompt(size * CHUNK_TOKENS), 0, size * CHUNK_TOKENS))
    inputs.fill_chunks(chunks)
    return inputs


def test_what_the_host_tells_is_what_the_device_reads() -> None:
    inputs = filled([*cut_chunks(2, prompt(3), 0, 3), *cut_chunks(4, prompt(9), 4, 8)], 4)
    assert inputs.slots.tolist() == [2, 4, PADDING, PADDING]
    assert inputs.starts.tolist() == [0, 4, 0, 0]
    assert inputs.counts.tolist() == [3, 4, 0, 0]
    assert inputs.ends.tolist() == [1, 0, 0, 0]
    assert inputs.tokens[0, :4].tolist() == [100, 101, 102, NO_TOKEN]
    assert inputs.following[0, :4].tolist() == [101, 102, NO_TOKEN, NO_TOKEN]
    assert inputs.following[1, :5].tolist() == [105, 106, 107, 108, NO_TOKEN]
    assert (inputs.tokens[2:] == NO_TOKEN).all()
    assert inputs.live_rows().tolist() == [
        2,
        CHUNK_TOKENS + 3,
        2 * CHUNK_TOKENS,
        3 * CHUNK_TOKENS,
    ]


def test_absent_rows_are_written_nowhere() -> None:
    inputs = filled(cut_chunks(2, prompt(3), 0, 3), 2)
    tables = torch.arange(6 * 8, dtype=torch.int32).view(6, 8)
    group = inputs.row_group(tables, block_tokens=16)
    slots = group.round_layout.write_slots.view(2, CHUNK_TOKENS)
    assert slots[0, :4].tolist() == [256, 257, 258, -1]
    assert (slots[0, 3:] == -1).all()
    assert (slots[1] == -1).all()


def test_only_prompts_that_end_move_their_sessions_on() -> None:
    inputs = filled([*cut_chunks(2, prompt(3), 0, 3), *cut_chunks(4, prompt(9), 4, 8)], 4)
    state = SequenceState(
        tables=torch.zeros((6, 1), dtype=torch.int32),
        lengths=torch.ones(6, dtype=torch.int32),
        roots=torch.zeros(6, dtype=torch.int32),
    )
    inputs.set_first_tokens(state, torch.tensor([7, 8, 9, 9], dtype=torch.int32))
    assert state.lengths.tolist() == [1, 1, 4, 1, 1, 1]
    assert state.roots.tolist() == [0, 0, 7, 0, 0, 0]
