"""Per-session tensors that the device keeps between rounds, one row per session slot.

X session slots (the last one is the padding slot, which is used for bucket rows without a session),
T blocks of the longest sequence, V columns of the logits, E entries of a slot. An entry is a column
with a bias or a ban.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.spec.noise import NoiseStream
from outrider.spec.sampling import Rule, SamplingParams

NUM_STREAMS = len(NoiseStream)


class SamplingState(NamedTuple):
    """Noise keys, temperature and acceptance rule of each session."""

    stream_keys: Tensor
    """int64 [X, NUM_STREAMS]: keys of the session's noise streams as 64-bit words, stream s in
    column s - 1; 0 for keys that this side does not know."""
    temperatures: Tensor
    """float32 [X]: temperature; 0 for greedy sessions."""
    rules: Tensor
    """int32 [X]: a RULE_* number."""


class SequenceState(NamedTuple):
    """Block table, length and root token of each session."""

    tables: Tensor
    """int32 [X, T]: pool blocks of each sequence, in order. Slot i of a sequence is pool slot
    tables[x, i // block_tokens] * block_tokens + i % block_tokens."""
    lengths: Tensor
    """int32 [X]: number of committed tokens, including the root. KV is written for lengths - 1 of
    them."""
    roots: Tensor
    """int32 [X]: the newest committed token, which the target has not run yet."""


class LogitsProcessorState(NamedTuple):
    """Logits-processor parameters of each session, by column of the logits."""

    flags: Tensor
    """int32 [X]: a sum of PROCESS_* flags; 0 if the session's logits are not changed."""
    penalties: Tensor
    """float32 [X, 3]: repetition, frequency and presence penalty."""
    counts: Tensor
    """int32 [X, V]: 2 for every occurrence in the output, plus 1 if the prompt contains the id.
    Only kept for sessions with penalties."""
    entry_counts: Tensor
    """int32 [X]: number of entries of a slot, at most E, sorted by column."""
    entry_columns: Tensor
    """int32 [X, E]: column of each entry."""
    entry_amounts: Tensor
    """float32 [X, E]: the logit bias of the column."""
    entry_ends: Tensor
    """int32 [X, E]: the column is banned at positions below this value."""
    top_ks: Tensor
    """int32 [X]: top-k; 0 if off."""
    top_ps: Tensor
    """float64 [X]: top-p; 1 if off."""
    min_p_floors: Tensor
    """float32 [X]: log(min_p); -inf if off."""


class AllowedTokenBits(NamedTuple):
    """Allowed-token masks as bits, for rows of sessions with PROCESS_GRAMMAR.

    C rows of bits, of W words of 32 ids each.
    """

    bits: Tensor
    """int32 [C, W]: id i is bit i % 32 of word i // 32; ids beyond the words are not allowed."""
    row_indices: Tensor
    """int32 [R]: index of the row of bits that belongs to each row of logits."""


PROCESS_PENALTIES = 1
PROCESS_BIAS = 2
PROCESS_TRUNCATION = 4
PROCESS_GRAMMAR = 8

RULE_GREEDY = 0
RULE_COUPLED = 1
RULE_TARGET_ONLY = 2
RULE_REJECTION = 3
"""Numbers of `outrider.spec.sampling.Rule` on the device (the effective rule: greedy at T = 0)."""

RULE_NUMBERS = {
    Rule.GREEDY: RULE_GREEDY,
    Rule.COUPLED: RULE_COUPLED,
    Rule.TARGET_ONLY: RULE_TARGET_ONLY,
    Rule.REJECTION: RULE_REJECTION,
}


_STREAMS = tuple(NoiseStream)
"""All noise streams, because iterating over the enumeration itself is slow."""


def stream_keys(sampling: SamplingParams) -> list[int]:
    """Return the row of `SamplingState.stream_keys` for a session: NUM_STREAMS words of 64 bits."""
    return [
        sampling.stream_key(stream) if sampling.has_noise_stream(stream) else 0
        for stream in _STREAMS
    ]


def stream_key_row(sampling: SamplingParams) -> NDArray[np.int64]:
    """Return the stream keys of a session, int64 [NUM_STREAMS]."""
    return np.array(stream_keys(sampling), dtype=np.uint64).view(np.int64)
