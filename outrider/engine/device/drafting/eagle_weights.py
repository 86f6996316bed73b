"""Weight tensors of an EAGLE-3 head, for kernels that fuse several of its modules.

Shapes: H hidden size, I MLP size, Q query heads, G key/value heads, d head dimension, V target
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.heads import DraftHead
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.linear import PlainLinear, plain_weights
from outrider.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """Weight tensors of one EAGLE-3 head. The weight of a projection has shape [out, in]."""

    config: HeadConfig
    embedding: Tensor
    """[V, H]: token embedding."""
    input_norm: Tensor
    """[H]: norm weight for the embedding."""
    hidden_norm: Tensor
    """[H]: norm weight for the feature."""
    post_norm: Tensor
    """[H]: norm weight before the MLP."""
    final_norm: Tensor
    """[H]: norm weight before `lm_head`. If `config.norm_output` is set, the output feature is
    normalised with it, too."""
    qkv: Tensor
    """[(Q + 2G) * d, 2H]: query rows, then keys, then values."""
    qkv_bias: Tensor | None
    """[(Q + 2G) * d]: bias of `qkv`; None if the head has no bias."""
    o_proj: Tensor
    """[H, Q * d]: output projection of attention."""
    gate_up: Tensor
    """[2I, H]: gate and up projections of the MLP, gate rows first."""
    down: Tensor
    """[H, I]: down projection of the MLP."""
    lm_head: Tensor
    """[Vd, H]: output projection."""
    target_ids: Tensor
    """int64 [Vd]: target id of every draft id."""
    draft_columns: Tensor
    """int32 [V]: draft id of every target id; -1 for target ids that cannot be drafted."""
    inv_freq: Tensor
    """float32 [d/2]: rotary frequencies."""

    @classmethod
    def from_head(cls, head: DraftHead) -> HeadWeights:
        """Return the weight tensors of a loaded head.

        The tensors are shared with the head, whose query, key and value weights become views of the
        fused `qkv`. Raises FailedPreconditionError for other kinds of heads and for weights that
        are packed for oneDNN.
        """
        if not isinstance(head, Eagle3Head):
            raise FailedPreconditionError(
                f"device drafting needs an eagle3 head, not {head.config.kind}"
            )
        config, block = head.config, head.block.weights
        qkv, qkv_bias = _fuse(*(plain_weights(linear) for linear in block.qkv))
        columns = torch.full((config.vocab_size,), -1, dtype=torch.int32, device=qkv.device)
        columns[head.target_ids] = torch.arange(
            config.draft_vocab_size, dtype=torch.int32, device=qkv.device
        )
        return cls(
            config=config,
            embedding=head.embedding,
            input_norm=head.input_norm,
            hidden_norm=head.hidden_norm,
            post_norm=block.post_norm,
            final_norm=head.final_norm,
            qkv=qkv,
            qkv_bias=qkv_bias,
            o_proj=plain_weights(block.o_proj).weight,
            gate_up=plain_weights(block.gate_up).weight,
            down=plain_weights(block.down).weight,
            lm_head=plain_weights(head.lm_head).weight,
            target_ids=head.target_ids,
            draft_columns=columns,
            inv_freq=head.block.inverse_frequencies,
        )

    @property
    def query_rows(self) -> int:
        """Q * d, the number of query rows of `qkv`. They are its first rows."""
        return self.config.num_heads * self.config.head_dim

    @property
    def query(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the query projection, as views of `qkv` and `qkv_bias`."""
        rows = self.query_rows
        return self.qkv[:rows], None if self.qkv_bias is None else self.qkv_bias[:rows]

    @property
    def kv(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the key and value projections, as views of `qkv` and `qkv_bias`."""
        rows = self.query_rows
        return self.qkv[rows:], None if self.qkv_bias is None else self.qkv_bias[rows:]


def can_extract(head: DraftHead) -> bool:
    """Return whether `HeadWeights.from_head` accepts this head: an EAGLE-3 head whose weights are
    not packed for oneDNN."""
    if not isinstance(head, Eagle3Head):
        return False
    block = head.block.weights
    linears = (*block.qkv, block.o_proj, block.gate_up, block.down, head.lm_head)
    return all(isinstance(linear, PlainLinear) for linear in linears)


def _fuse(query: PlainLinear, kv: PlainLinear) -> tuple[Tensor, Tensor | None]:
    """Return one weight and bias for both projections, and make theirs views of these tensors."""
    rows = query.weight.shape[0]
    weight = _joined(query.weight, kv.weight)
    query.weight, kv.weight = weight[:rows], weight[rows:]
    if query.bias is None and kv.bias is None:
        return weight, None
    biases = (
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias
        for linear in (query, kv)
    )
    bias = _joined(*biases)
    query.bias, kv.bias = bias[:rows], bias[rows:]
    return weight, bias


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Return both tensors concatenated, without a copy if they already lie next to each other in
    memory."""
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    adjacent = second.data_ptr() == first.data_ptr() + first.nbytes
    shared = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if adjacent and shared and first.is_contiguous() and second.is_contiguous():
        return first.as_strided(shape, first.stride())
    return torch.cat((first, second))
