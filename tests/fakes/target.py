"""A target whose logits are a function of the visible tokens, kept in a real KV pool.

Each slot's key holds a token id, so what a row sees is read back through the real commit, mask
and block tables: a wrong mask or a wrong compaction changes the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.engine.kv_cache import KVPool
from outrider.engine.target import ForwardBatch, ForwardOutput
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.sampling import SamplingParams

FEATURE_SIZE = 2
NO_BLOCKS = KVPool(num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=1, block_tokens=1)
"""Of sessions that are in no real round."""


class FakeTarget:
    """V token ids; the distribution after a context is peaked and depends on the whole context."""

    def __init__(
        self,
        *,
        vocab_size: int = 24,
        num_blocks: int = 64,
        block_tokens: int = 4,
        peak: float = 2.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.pool = KVPool(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
        )
        self.device = torch.device("cpu")
        self.batches: list[ForwardBatch] = []
        self.before_forward: Callable[[ForwardBatch], None] | None = None
        """Called first; may raise or sleep."""
        self.forward_s = 0.0
        self._peak = peak

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """float32 [V] after these tokens."""
        rng = np.random.default_rng(extend_digest(EMPTY_DIGEST, context))
        return (self._peak * rng.standard_normal(self.vocab_size)).astype(np.float32)

    def feature(self, context: Sequence[int]) -> NDArray[np.float32]:
        """float32 [2] of the last token of a context: a hash of it, and its position."""
        digest = extend_digest(EMPTY_DIGEST, context)
        return np.array([digest % 65521, len(context) - 1], dtype=np.float32)

    def forward(self, batch: ForwardBatch, *, tap_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Logits and features of every row from the tokens that it sees."""
        self.batches.append(batch)
        if self.before_forward is not None:
            self.before_forward(batch)
        if self.forward_s:
            time.sleep(self.forward_s)
        contexts: list[list[int]] = []
        start = 0
        for segment in batch.segments:
            sequence, count = segment.sequence, segment.num_rows
            sequence.begin(segment.positions)
            base = sequence.len
            slots = sequence.slots(0, base + count)
            keys = self.pool.storage[0, 0, 0]
            keys[slots[base:], 0] = batch.token_ids[start : start + count].float()
            tokens = keys[slots, 0].long().tolist()
            mask = segment.mask
            if mask is None:
                mask = torch.ones(count, count).tril().bool()
            for row in range(count):
                seen = [tokens[base + i] for i in range(count) if bool(mask[row, i])]
                contexts.append(tokens[:base] + seen)
                assert int(segment.positions[row]) == len(contexts[-1]) - 1
            start += count
        wanted = range(start) if batch.logit_rows is None else batch.logit_rows.tolist()
        rows = [self.logits(contexts[row]) for row in wanted]
        logits = np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)
        taps = None
        if tap_layers:
            taps = torch.from_numpy(np.stack([self.feature(c) for c in contexts]))
        return ForwardOutput(logits=torch.from_numpy(logits), taps=taps)

    def decode(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        stop: Sequence[int] = (),
        min_new: int = 0,
    ) -> list[int]:
        """The slow reference: one token at a time, no KV, no draft."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            emitted = len(tokens) - len(prompt)
            row = AcceptRow(
                logits_start=0,
                sampling=sampling,
                position=len(tokens),
                prompt_ids=np.array(prompt, dtype=np.int32),
                output_ids=np.array(tokens[len(prompt) :], dtype=np.int32),
                banned_now=tuple(stop) if emitted < min_new else (),
            )
            logits = torch.from_numpy(self.logits(tokens)[None])
            tokens.append(accept_drafts(logits, [row])[0].tokens[0])
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]


class FakeProjection:
    """Hands the fake target's features on, doubled: projected ones are told from raw ones."""

    fingerprint = "fake-projection"
    tap_layers: tuple[int, ...] = (0,)
    hidden_size = FEATURE_SIZE

    def __call__(self, raw: Tensor) -> Tensor:
        """[M, 2] -> [M, 2]."""
        return 2.0 * raw
