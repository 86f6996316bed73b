"""Drafts in-process chains token by token, so that the host can mask each token by a grammar.

Level i of a chain is its draft token i, counted from 0. The head's logits of a level do not depend
on the grammar's mask, so the device computes them while the host computes the mask.

Shapes: X session slots, B sessions of a pass, n in-process drafts per session, H hidden size, Vd
draft vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.draft_masks import DraftTokenMasks
from outrider.engine.device.drafting.draft_program import DraftProgram
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.drafting.recent_rows import RecentRows
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.kernels.acceptance.randomized import DenseChainDistribution
from outrider.engine.kernels.drafts.in_process_distributions import write_distributions
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import process_draft_logits
from outrider.engine.kernels.sampling import choose_tokens


class ChainLevelDrafter:
    """Drafts chains one level at a time: the head computes the logits of a level, then one token
    per session is chosen. Never synchronises with the host."""

    def __init__(
        self,
        program: DraftProgram,
        weights: HeadWeights,
        slots: DeviceSessionSlots,
        *,
        kept: RecentRows,
        tokens: Tensor,
        distribution: DenseChainDistribution,
        warp: LogitsSlots,
    ) -> None:
        """weights: the weights of the head that `program` runs. kept: the newest draft rows of each
        session. tokens: int32 [X, n], the tensor to which the chains are written. distribution:
        receives the probabilities that the tokens are drawn from. warp: state of the sessions'
        logits processor."""
        self._program, self._slots, self._kept = program, slots, kept
        self._tokens, self._distribution, self._warp = tokens, distribution, warp
        dtype, device = weights.lm_head.dtype, weights.lm_head.device
        size = (len(tokens), weights.config.hidden_size)
        self._features = torch.zeros(size, dtype=dtype, device=device)
        """[X, H]: hidden state of the head for the newest row of each session."""
        if dtype is torch.float16:
            dtype = torch.float32
        self._logits = torch.zeros(
            (len(tokens), len(weights.target_ids)), dtype=dtype, device=device
        )
        """[X, Vd]: logits of the head for the token after each session's newest row."""

    def run_rows(self, rows: NewRows) -> None:
        """Run the head over new draft rows, and store the head's output and logits for the last row
        of each session."""
        x, places = self._program.catch_up(rows), rows.slots.long()
        self._features.index_copy_(0, places, x)
        self._logits.index_copy_(0, places, self._program.forward.logits(x))

    def run_level(self, slots: Tensor, levels: Tensor) -> None:
        """Run the head over the chains' previous tokens to compute the logits of the given levels.
        slots: int32 [B]. levels: int32 [B], the level of each slot's chain, at least 1."""
        places = slots.long()
        tokens = self._tokens[places].gather(1, (levels - 1).long()[:, None])
        self.run_rows(
            NewRows(
                slots=slots,
                tables=self._slots.sequence.tables,
                tokens=tokens,
                features=self._features[places][:, None],
                counts=((slots != self._slots.padding) & (tokens[:, 0] >= 0)).int(),
                starts=self._kept.newest_positions(slots) + levels,
            )
        )

    def choose_tokens_at(
        self, slots: Tensor, levels: Tensor, allowed_tokens: DraftTokenMasks
    ) -> Tensor:
        """Draft the token at the given level of each session's chain, among the tokens that its
        mask allows. Return the tokens' target ids, int32 [B].

        The token is chosen by the session's acceptance rule, as in `DraftProgram.draft_chain`.
        Tokens that the chain already has after this level are cleared. slots, levels: int32 [B].
        """
        places, state, vocabulary = (
            slots.long(),
            self._slots.sampling,
            self._program.forward.vocabulary,
        )
        ids = vocabulary.target_ids
        earlier = torch.arange(self._tokens.shape[1], device=slots.device) < levels[:, None]
        known = torch.where(earlier, self._tokens[places], -1)
        path = OutputPath(vocabulary.columns_of(known), num_visible=known.shape[1])
        # The newest row, at position p, pairs a feature with token p + 1 and predicts token p +
        # 2.
        following = self._kept.newest_positions(slots) + 2 + levels
        logits = allowed_tokens.apply_masks(self._logits[places], 0, ids)
        logits = process_draft_logits(logits, self._warp.state, state, slots, following, path)
        chosen = choose_tokens(
            logits, state, slots, following, rows_per_slot=1, side="draft", ids=ids
        )
        drafted = ids[chosen.long()].int()
        known.scatter_(1, levels.long()[:, None], drafted[:, None])
        self._tokens.index_copy_(0, places, known)
        write_distributions(self._distribution.probs, logits, state, slots, levels)
        return drafted
