"""Per-session tensors that the device keeps between rounds, one row a session slot.

X session slots (the last one is the padding slot, which fills the rows of a bucket that no session
uses), T blocks of the longest sequence, V columns of the logits, E entries of a slot.
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
    """int64 [X, NUM_STREAMS]: the keys of the session's noise streams as 64-bit words, by stream
    number less one; 0 where this side does not know the key."""
    temperatures: Tensor
    """float32 [X]; 0 for greedy sessions."""
    rules: Tensor
    """int32 [X]: a RULE_* number."""


class SequenceState(NamedTuple):
    """Block table, length and root token of each session."""

    tables: Tensor
    """int32 [X, T]: pool blocks in order; slot i of a sequence is pool slot
    tables[x, i // block_tokens] * block_tokens + i % block_tokens."""
    lengths: Tensor
    """Number of committed tokens, including the root, int32 [X]; KV is written for lengths - 1 of
    them."""
    roots: Tensor
    """int32 [X]: the newest committed token, not yet run."""


class LogitsProcessorState(NamedTuple):
    """Logits-processor parameters of each session, in terms of logits columns."""

    flags: Tensor
    """int32 [X]: a sum of PROCESS_*; 0 leaves the session's rows alone."""
    penalties: Tensor
    """float32 [X, 3]: repetition, frequency, presence."""
    counts: Tensor
    """int32 [X, V]: 2 for every occurrence in the output, and 1 if the prompt has the id. Of
    sessions with penalties only."""
    entry_counts: Tensor
    """int32 [X]: entries of a slot, at most E, by ascending column."""
    entry_columns: Tensor
    """int32 [X, E]."""
    entry_amounts: Tensor
    """float32 [X, E]: the logit bias of the column."""
    entry_ends: Tensor
    """int32 [X, E]: the column is banned at positions below this one."""
    top_ks: Tensor
    """int32 [X]; 0: off."""
    top_ps: Tensor
    """float64 [X]; 1: off."""
    min_p_floors: Tensor
    """float32 [X]: log(min_p); -inf: off."""


class AllowedTokenBits(NamedTuple):
    """Allowed-token masks as bits, for the rows of sessions that have PROCESS_GRAMMAR; W words of
    32 ids."""

    bits: Tensor
    """int32 [C, W]: id i is bit i % 32 of word i // 32; ids beyond the words are not allowed."""
    row_indices: Tensor
    """int32 [R]: the row of bits of a row of logits."""


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
    """Return a slot's row of `SamplingState.stream_keys`: NUM_STREAMS words of 64 bits."""
    return [
        sampling.stream_key(stream) if sampling.has_noise_stream(stream) else 0
        for stream in _STREAMS
    ]


def stream_key_row(sampling: SamplingParams) -> NDArray[np.int64]:
    """Return the stream keys of a session, int64 [NUM_STREAMS]."""
    return np.array(stream_keys(sampling), dtype=np.uint64).view(np.int64)
