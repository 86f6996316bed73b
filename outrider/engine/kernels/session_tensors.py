"""Per-session tensors that the device keeps between rounds, one row per session slot.

Shapes: X session slots (the last one is the padding slot, for rows of a batch bucket that have no
session), T blocks of the longest sequence, V columns of the logits, E entries of a slot. An entry
is a column of the logits with a bias or a ban.
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
    """Keys of the random streams, temperature and acceptance rule of each session."""

    stream_keys: Tensor
    """int64 [X, NUM_STREAMS]: keys of the session's random streams as 64-bit words. Column s - 1
    has the key of stream s; 0 if this process does not have it."""
    temperatures: Tensor
    """float32 [X]: temperature; 0 for greedy sessions."""
    rules: Tensor
    """int32 [X]: acceptance rule, one of the RULE_* constants."""


class SequenceState(NamedTuple):
    """Block table, length and root token of each session."""

    tables: Tensor
    """int32 [X, T]: KV blocks of each sequence, in order. The KV of position i is in slot
    tables[x, i // block_tokens] * block_tokens + i % block_tokens of the KV pool."""
    lengths: Tensor
    """int32 [X]: number of committed tokens, including the root. All of them but the root have KV
    in the cache."""
    roots: Tensor
    """int32 [X]: the newest committed token, which the target model has not processed yet."""


class LogitsProcessorState(NamedTuple):
    """Logits-processor parameters of each session. They refer to columns of the logits, which are
    target ids or ids of the draft vocabulary."""

    flags: Tensor
    """int32 [X]: a sum of PROCESS_* flags; 0 if the session's logits are not changed."""
    penalties: Tensor
    """float32 [X, 3]: repetition, frequency and presence penalty."""
    counts: Tensor
    """int32 [X, V]: 2 for every occurrence of the token in the output, plus 1 if the prompt
    contains it. Maintained only for sessions with penalties."""
    entry_counts: Tensor
    """int32 [X]: number of entries of a slot, at most E."""
    entry_columns: Tensor
    """int32 [X, E]: column of each entry, in increasing order."""
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
    """Allowed-token masks of grammars as bits. They apply to rows of sessions with PROCESS_GRAMMAR.

    Shapes: C masks of W words for 32 ids each, R rows of logits.
    """

    bits: Tensor
    """int32 [C, W]: id i is allowed if bit i % 32 of word i // 32 is 1. Ids beyond the last word
    are not allowed."""
    row_indices: Tensor
    """int32 [R]: for each row of logits, the index of its mask in `bits`."""


PROCESS_PENALTIES = 1
PROCESS_BIAS = 2
PROCESS_TRUNCATION = 4
PROCESS_GRAMMAR = 8

RULE_GREEDY = 0
RULE_COUPLED = 1
RULE_TARGET_ONLY = 2
RULE_REJECTION = 3
"""Numbers of `outrider.spec.sampling.Rule` in device tensors. Sessions with temperature 0 have
RULE_GREEDY."""

RULE_NUMBERS = {
    Rule.GREEDY: RULE_GREEDY,
    Rule.COUPLED: RULE_COUPLED,
    Rule.TARGET_ONLY: RULE_TARGET_ONLY,
    Rule.REJECTION: RULE_REJECTION,
}


_STREAMS = tuple(NoiseStream)
"""All random streams. Iterating over a tuple is faster than over the enumeration."""


def stream_keys(sampling: SamplingParams) -> list[int]:
    """Return the keys of a session's random streams, NUM_STREAMS unsigned 64-bit integers, with 0
    for streams whose key this process does not have."""
    return [
        sampling.stream_key(stream) if sampling.has_noise_stream(stream) else 0
        for stream in _STREAMS
    ]


def stream_key_row(sampling: SamplingParams) -> NDArray[np.int64]:
    """Return `stream_keys` of a session as a row of `SamplingState.stream_keys`, int64
    [NUM_STREAMS]."""
    return np.array(stream_keys(sampling), dtype=np.uint64).view(np.int64)
