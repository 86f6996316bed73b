"""A draft head in the verifier's own process (colocated and fused placement).

X session slots, B rows, R catch-up rows, K drafts, H feature width, Vd draft vocabulary. The
head's K/V has the slots of the target's pool and is addressed by the same block tables.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.draft import DraftProgram, NewRows
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.device.slots import SessionSlots
from outrider.engine.device.warp_slots import WarpSlots
from outrider.engine.heads import DraftHead
from outrider.engine.kernels.coins import ChainLaw
from outrider.engine.kvcache import KVPool

_CATCH_UP_ROWS = 1024
"""Prompt rows of one piece: bounds temporary memory."""


class OwnHead:
    """Drafts a chain of `length` tokens for every session, on the device."""

    def __init__(
        self, head: DraftHead, slots: SessionSlots, pool: KVPool, *, length: int, max_len: int
    ) -> None:
        self.length = length
        weights = HeadWeights.from_head(head)
        device, config = pool.storage.device, head.config
        self._slots = slots
        self.program = DraftProgram(
            weights,
            storage=torch.zeros(
                (2, 1, config.num_kv_heads, pool.storage.shape[3], config.head_dim),
                dtype=pool.storage.dtype,
                device=device,
            ),
            block_tokens=pool.block_tokens,
            max_len=max_len,
        )
        count = slots.sequence.lengths.shape[0]
        self.tokens = torch.full((count, length), -1, dtype=torch.int32, device=device)
        """int32 [X, K]: the drafts that each session's next round verifies."""
        self.law = ChainLaw(
            probs=torch.zeros(
                (count, length, config.draft_vocab_size), dtype=torch.float32, device=device
            ),
            draft_columns=weights.draft_columns,
            target_ids=weights.target_ids,
        )
        """The laws that they were drawn from, kept with the session until they are used."""
        self.warp = WarpSlots(
            count, config.draft_vocab_size, device, draft_columns=weights.draft_columns
        )
        """What the sessions do to the head's logits."""

    def draft(
        self,
        slots: Tensor,
        *,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        starts: Tensor,
        with_law: bool,
    ) -> None:
        """Catch up on real rows and draft: tokens int32 [B, R] (t_{i+1} of draft row i), features
        [B, R, H], counts int32 [B] of real rows, starts int32 [B] their first draft position."""
        tables = self._slots.sequence.tables
        self._chain(NewRows(slots, tables, tokens, features, counts, starts), with_law)

    def _chain(self, rows: NewRows, with_law: bool) -> None:
        chain = self.program.chain(
            rows,
            length=self.length,
            state=self._slots.sampling,
            warp=self.warp.state if with_law else None,
            with_probs=with_law,
        )
        places = rows.slots.long()
        self.tokens.index_copy_(0, places, chain.tokens)
        if with_law and chain.probs is not None:
            self.law.probs.index_copy_(0, places, chain.probs)

    def prefill(
        self,
        slot: int,
        tokens: NDArray[np.int32],
        features: Tensor,
        *,
        start: int,
        last: bool,
        with_law: bool,
    ) -> None:
        """Catch up on a prompt's rows [m] from draft position `start`; draft if they are the last.

        Eager, and it waits for the device: prompts are not on the path of a round.
        """
        device = features.device
        ids = torch.from_numpy(tokens.astype(np.int32)).to(device)
        for begin in range(0, len(tokens), _CATCH_UP_ROWS):
            end = min(begin + _CATCH_UP_ROWS, len(tokens))
            rows = NewRows(
                slots=torch.tensor([slot], dtype=torch.int32, device=device),
                tables=self._slots.sequence.tables,
                tokens=ids[None, begin:end].contiguous(),
                features=features[None, begin:end],
                counts=torch.tensor([end - begin], dtype=torch.int32, device=device),
                starts=torch.tensor([start + begin], dtype=torch.int32, device=device),
            )
            if last and end == len(tokens):
                self._chain(rows, with_law)
            else:
                self.program.write(rows)
