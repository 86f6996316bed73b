"""EAGLE-1/2 draft head.

Shapes: N rows, H hidden size, nq query heads, nkv key/value heads, hd head dimension, V vocabulary
size. The head uses the target's own lm_head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.heads.eagle3 import BlockWeights, HeadBlock
from outrider.engine.heads.layers import Linear, rms_norm


class EagleHead:
    """EAGLE-1/2 head: one Llama block, usually without an input norm, over fc([embedding;
    feature]).

    The feature is the target's hidden state after its final norm, so the head has no norm before
    the lm_head.
    """

    def __init__(
        self,
        config: HeadConfig,
        block: BlockWeights,
        *,
        fingerprint: str,
        embedding: Tensor,
        fc: Linear,
        input_norm: Tensor | None,
        lm_head: Linear,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.target_ids = torch.arange(config.vocab_size, device=embedding.device)
        self._embedding = embedding
        self._fc = fc
        self._input_norm = input_norm
        self._lm_head = lm_head
        self._block = HeadBlock(config, block, embedding.device)

    def inputs(self, token_ids_N: Tensor, features_NH: Tensor) -> Tensor:
        """Return fc([embedding; feature]), [N, H]."""
        embedded = F.embedding(token_ids_N, self._embedding)
        return self._fc(torch.cat((embedded, features_NH), dim=-1))

    def residual(self, inputs: Tensor, features_NH: Tensor) -> Tensor:
        """Return `inputs`: this head has no separate residual."""
        return inputs

    def kv(self, inputs: Tensor, features_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys with RoPE applied, and values without, each [N, nkv, hd]."""
        return self._block.kv(self._normed(inputs), positions_N)

    def query(self, inputs: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries [N, nq, hd] with RoPE applied."""
        return self._block.query(self._normed(inputs), positions_N)

    def finish(self, residual_NH: Tensor, attn_out_NQh: Tensor) -> Tensor:
        """Return x [N, H], the prediction of the target's final-norm output at the next
        position."""
        return self._block.finish(residual_NH, attn_out_NQh)

    def logits(self, x_NH: Tensor) -> Tensor:
        """Return float32 logits [N, V]."""
        return self._lm_head(x_NH).float()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return `draft_ids` unchanged, because the head has the target's vocabulary."""
        return draft_ids

    def _normed(self, inputs: Tensor) -> Tensor:
        if self._input_norm is None:
            return inputs
        return rms_norm(inputs, self._input_norm, self.config.rms_norm_eps)
