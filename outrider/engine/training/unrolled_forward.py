"""Unrolled forward of a trainable EAGLE-3 head (training-time test).

Shapes: B rows, S positions per row, Q selected positions per row (those that predict a token of an
answer), H hidden size, nq query heads, nkv key/value heads, hd head dimension, Vd draft vocabulary
size, T earlier draft steps to which a draft step may attend.

All positions have keys and values from features of the target. Drafts start only at selected
positions. At draft step j, the row of the selected position i reads the token t_{i+1+j} and, for j
> 0, its own output of step j-1 (at step 0, the target's features). It attends to the keys and
values up to position i and to its own ones of steps 1 to j. It has the RoPE position i + j and
predicts t_{i+2+j}. The positions of an answer are contiguous, so a shift by j along Q is a shift by
j tokens within the same sample.

Every draft step runs the head's block and the logits, and needs memory for both. Look-ahead needs
many steps: a chain of K tokens below an unverified chain of K tokens takes 2K + 1. The last ones,
the deep steps, may therefore run only on the first rows of a batch. Rows are in random order, so
the mean loss of these rows is an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.heads.layers import rms_norm, rope_inverse_frequencies
from outrider.engine.training.data import TrainingBatch
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.target import TrainingTarget, rotary, rotate

MAX_STEPS = 16
"""Maximum number of draft steps. `Labels` are padded by this number of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSteps:
    """Draft steps that run on a part of the batch only (deep steps), and the size of this part."""

    first: int
    """Index of the first deep step, at least 1. Earlier steps run on the whole batch."""
    share: float
    """Share of the batch's rows on which deep steps run, within (0, 1]. At least one row is
    used."""

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"at least 1 step runs on the whole batch, not {self.first}")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"the share of deep steps must be within (0, 1], not {self.share}")

    def rows(self, batch_rows: int) -> int:
        """Return on how many of the batch's rows deep steps run."""
        return max(1, round(self.share * batch_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled:
    """Outputs of the unrolled forward. Each list has one tensor per draft step; those of deep steps
    have fewer rows."""

    losses: list[Tensor]
    """Scalars: mean loss over the valid positions whose label is in the draft vocabulary."""
    correct: list[Tensor]
    """Bool [B, Q]: whether the argmax of the head's logits is the label."""
    valid: list[Tensor]
    """Bool [B, Q]: whether the position has a label, that is, whether the sample has a token
    there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the head should predict at each selected position."""

    probs_BQV: Tensor
    """[B, Q + MAX_STEPS, Vd]: the target's distribution of the next token, restricted to the draft
    vocabulary; the last MAX_STEPS positions are padding."""
    ids_BQ: Tensor
    """Int64 [B, Q + MAX_STEPS]: draft id of the next token; -1 if it is outside the draft
    vocabulary. Padded like `probs_BQV`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Inputs of all draft steps. Deep steps use only their first rows."""

    keys: Tensor
    """[B, S, nkv, hd]: keys computed from features of the target; `values` has the same shape."""
    values: Tensor
    mask: Tensor
    """Bool [B, Q, S]: whether a selected position attends to each position of its row."""
    ids: Tensor
    """Int64 [B, Q + MAX_STEPS]: the token that a selected position reads at step 0, padded."""
    documents: Tensor
    """Int64 [B, Q + MAX_STEPS]: index of the sample of each selected position, -1 for padding."""
    positions: Tensor
    """Int64 [B, Q]: position of each selected position within its sample."""
    probs: Tensor
    """`Labels.probs_BQV`; `label_ids` is `Labels.ids_BQ`."""
    label_ids: Tensor

    def first(self, rows: int) -> _Rows:
        """Return the inputs of the batch's first rows."""
        return _Rows(**{name: getattr(self, name)[:rows] for name in _Rows.__dataclass_fields__})


class UnrolledForward:
    """Runs a TrainableHead for several draft steps over a packed batch."""

    def __init__(
        self,
        head: TrainableHead,
        embedding: Tensor,
        *,
        dtype: torch.dtype,
        compile: bool = False,
        max_steps: int = MAX_STEPS,
        deep: DeepSteps | None = None,
    ) -> None:
        """`max_steps`: maximum number of draft steps of a call, for which compiled code allocates
        its tensors. `deep`: which steps run on only a part of the batch; None for none."""
        if not 1 <= max_steps <= MAX_STEPS:
            raise ValueError(f"steps must be within 1..{MAX_STEPS}, not {max_steps}")
        self.head = head
        self._embedding = embedding
        self._dtype = dtype
        self._max_steps = max_steps
        self._deep = deep or DeepSteps(first=max_steps, share=1.0)
        self._compiled = compile
        self._inv_freq = rope_inverse_frequencies(head.config, embedding.device)
        wrap: Callable[[Any], Any] = (
            (lambda f: torch.compile(f, dynamic=False)) if compile else (lambda f: f)
        )
        self._project: Callable[..., tuple[Tensor, Tensor, Tensor]] = wrap(_project)
        self._attend = wrap(_attend)
        self._finish = wrap(_finish)
        self._score = wrap(_score)

    def __call__(
        self,
        batch: TrainingBatch,
        taps_BSF: Tensor,
        labels: Labels,
        steps: int,
        trace: Trace | None = None,
    ) -> Unrolled:
        """Run `steps` draft steps and return their losses and which drafts are correct. The first
        step reads features of the target, the others read the head's own outputs."""
        if not 1 <= steps <= self._max_steps:
            raise ValueError(f"steps must be within 1..{self._max_steps}, not {steps}")
        trace = trace or Trace()
        w, config = self.head.weights(self._dtype), self.head.config
        rows, features, inputs = self._stable_rows(w, batch, taps_BSF, labels, trace)
        width = batch.selected_BQ.shape[1]
        losses, correct, valid_steps = [], [], []
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            if step == self._deep.first:
                kept = self._deep.rows(len(features))
                rows, features = rows.first(kept), features[:kept]
                own = [(k[:kept], v[:kept]) for k, v in own]
            if step:
                inputs = self._inputs(w, rows.ids[:, step : step + width], features)
            q, k, v = self._projected(w, inputs, rows.positions + step)
            if step:
                own.append((k, v))
            seen = _in_process_rows(own, k, v, self._num_draft_rows(step))
            attended = self._attend(q, rows.keys, rows.values, rows.mask, *seen)
            features = self._finish(features, attended, _block(w), config.rms_norm_eps)
            loss, hits, valid = self._scored(w, features, rows, step)
            for name, value in zip(
                ("inputs", "query", "attention", "x"), (inputs, q, attended, features), strict=True
            ):
                trace.add(step, name, value)
            if trace.is_enabled:
                normed = rms_norm(features, w["norm.weight"], config.rms_norm_eps)
                trace.add(step, "logits", F.linear(normed, w["lm_head.weight"]).float())
            losses.append(loss)
            correct.append(hits)
            valid_steps.append(valid)
        return Unrolled(losses=losses, correct=correct, valid=valid_steps)

    def _num_draft_rows(self, step: int) -> int:
        """Return for how many earlier draft steps the tensors of a step have space. Compiled code
        has one shape for steps on the whole batch and one for deep steps. Otherwise the number is
        that of the existing earlier steps, and at least 1."""
        if not self._compiled:
            return max(1, step)
        first = min(self._deep.first, self._max_steps)
        return max(1, first - 1 if step < first else self._max_steps - 1)

    def _scored(
        self, w: dict[str, Tensor], x: Tensor, rows: _Rows, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of a draft step, which drafts are correct, and which positions have a
        label."""
        width = x.shape[1]
        there = slice(step + 1, step + 1 + width)
        ids, document = rows.label_ids[:, there], rows.documents[:, there]
        valid = (document == rows.documents[:, :width]) & (document >= 0)
        loss, best = self._score(
            x,
            w["norm.weight"],
            w["lm_head.weight"],
            rows.probs[:, there],
            valid & (ids >= 0),
            self.head.config.rms_norm_eps,
        )
        return loss, best == ids, valid

    def _stable_rows(
        self, w: dict[str, Tensor], batch: TrainingBatch, taps: Tensor, labels: Labels, trace: Trace
    ) -> tuple[_Rows, Tensor, Tensor]:
        """Return the inputs of all steps, and the features and block inputs of the selected
        positions."""
        features = F.linear(taps.to(self._dtype), w["fc.weight"])
        inputs = self._inputs(w, batch.next_ids_BS, features)
        _, keys, values = self._projected(w, inputs, batch.positions_BS)
        trace.add(0, "feature", features)
        trace.add(0, "key", keys)
        trace.add(0, "value", values)
        selected = batch.selected_BQ
        mask = batch.attention_mask().gather(
            1, selected[:, :, None].expand(-1, -1, batch.ids_BS.shape[1])
        )
        rows = _Rows(
            keys=keys,
            values=values,
            mask=mask,
            ids=F.pad(batch.next_ids_BS.gather(1, selected), (0, MAX_STEPS)),
            documents=F.pad(batch.selected_documents_BQ, (0, MAX_STEPS), value=-1),
            positions=batch.positions_BS.gather(1, selected),
            probs=labels.probs_BQV,
            label_ids=labels.ids_BQ,
        )
        return rows, _take(features, selected), _take(inputs, selected)

    def _inputs(self, w: dict[str, Tensor], ids: Tensor, features: Tensor) -> Tensor:
        eps = self.head.config.rms_norm_eps
        embedded = F.embedding(ids, self._embedding).to(self._dtype)
        return torch.cat(
            (
                rms_norm(embedded, w["midlayer.input_layernorm.weight"], eps),
                rms_norm(features, w["midlayer.hidden_norm.weight"], eps),
            ),
            dim=-1,
        )

    def _projected(
        self, w: dict[str, Tensor], inputs: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rotary(positions, self._inv_freq, inputs.dtype)
        names = ("q_proj", "k_proj", "v_proj")
        fused = torch.cat([w[f"midlayer.self_attn.{n}.weight"] for n in names])
        c = self.head.config
        return self._project(inputs, fused, cos, sin, (c.num_heads, c.num_kv_heads, c.head_dim))


class Trace:
    """Receives the intermediate tensors of each draft step. This base class discards them."""

    is_enabled = False
    """Whether to compute also those tensors that only the trace needs."""

    def add(self, step: int, name: str, value: Tensor) -> None:
        """Receive the tensor `name` of draft step `step`."""


def _take(rows: Tensor, index_BQ: Tensor) -> Tensor:
    return rows.gather(1, index_BQ[:, :, None].expand(-1, -1, rows.shape[-1]))


def _in_process_rows(
    own: list[tuple[Tensor, Tensor]], like_k: Tensor, like_v: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the keys and values of the draft steps so far, padded to `size` steps (T).

    Returns keys and values [B, Q, T, nkv, hd] and a bool [T] that is True for existing steps.
    """
    missing = size - len(own)
    present = torch.arange(size, device=like_k.device) < len(own)
    zeros_k, zeros_v = torch.zeros_like(like_k), torch.zeros_like(like_v)
    return (
        torch.stack([k for k, _ in own] + [zeros_k] * missing, dim=2),
        torch.stack([v for _, v in own] + [zeros_v] * missing, dim=2),
        present,
    )


def _block(w: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        w["midlayer.self_attn.o_proj.weight"],
        w["midlayer.post_attention_layernorm.weight"],
        w["midlayer.mlp.gate_proj.weight"],
        w["midlayer.mlp.up_proj.weight"],
        w["midlayer.mlp.down_proj.weight"],
    )


def _project(
    inputs: Tensor, fused: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    num_q, num_kv, head_dim = heads
    rows = F.linear(inputs, fused).view(*inputs.shape[:-1], num_q + 2 * num_kv, head_dim)
    q, k = rows[..., :num_q, :], rows[..., num_q : num_q + num_kv, :]
    return rotate(q, cos, sin), rotate(k, cos, sin), rows[..., num_q + num_kv :, :]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    present: Tensor,
) -> Tensor:
    """Return the attention output of each selected position. It is one softmax over the positions
    of the row under `mask` [B, Q, S] and over its own T earlier draft steps."""
    batch, width, num_q, head_dim = q.shape
    num_kv = keys.shape[2]
    grouped = q.view(batch, width, num_kv, num_q // num_kv, head_dim).permute(0, 2, 3, 1, 4)
    stacked = grouped.reshape(batch, num_kv, -1, head_dim)
    scores = (stacked @ keys.permute(0, 2, 3, 1)).view(*grouped.shape[:-1], -1).float()
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    own_k = own_keys.permute(0, 3, 1, 2, 4)[:, :, None]
    own_v = own_values.permute(0, 3, 1, 2, 4)[:, :, None]
    own = (grouped[..., None, :].float() * own_k.float()).sum(-1)
    own = own.masked_fill(~present, float("-inf"))
    probs = (torch.cat((scores, own), dim=-1) * head_dim**-0.5).softmax(-1)
    size = scores.shape[-1]
    stable = probs[..., :size].to(q.dtype).reshape(batch, num_kv, -1, size)
    out: Tensor = (stable @ values.transpose(1, 2)).view(grouped.shape)
    out = out + (probs[..., size:, None] * own_v.float()).sum(-2).to(q.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


def _finish(residual: Tensor, attended: Tensor, block: tuple[Tensor, ...], eps: float) -> Tensor:
    o_proj, post_norm, gate, up, down = block
    h = residual + F.linear(attended.flatten(-2), o_proj)
    normed = rms_norm(h, post_norm, eps)
    return h + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def _score(
    x: Tensor, norm: Tensor, lm_head: Tensor, probs: Tensor, counted: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy against the target's distributions `probs`, over the positions
    in `counted`, and the argmax of the head's logits."""
    logits = F.linear(rms_norm(x, norm, eps), lm_head).float()
    per_row = -(probs * logits.log_softmax(-1)).sum(-1)
    loss = (per_row * counted).sum() / counted.sum().clamp_min(1)
    return loss, logits.argmax(-1)


@torch.no_grad()
def make_labels(
    head: TrainableHead, target: TrainingTarget, final_BSH: Tensor, batch: TrainingBatch
) -> Labels:
    """Return the labels of all selected positions: the target's distributions and their argmax.
    final_BSH: the target's hidden states after its final norm."""
    logits = target.logits(_take(final_BSH, batch.selected_BQ))
    return labels_from_ids(head, logits, logits.argmax(-1))


@torch.no_grad()
def labels_from_ids(head: TrainableHead, logits_BQV: Tensor, ids_BQ: Tensor) -> Labels:
    """Return labels with the distributions of the target's logits and with given next tokens
    `ids_BQ` (target ids), for example those of a greedy answer."""
    target_ids = head.target_ids.to(ids_BQ.device)
    draft_ids = torch.full((logits_BQV.shape[-1],), -1, device=ids_BQ.device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=ids_BQ.device)
    probs = logits_BQV[..., target_ids].float().softmax(-1).to(logits_BQV.dtype)
    return Labels(
        probs_BQV=F.pad(probs, (0, 0, 0, MAX_STEPS)),
        ids_BQ=F.pad(draft_ids[ids_BQ], (0, MAX_STEPS), value=-1),
    )
