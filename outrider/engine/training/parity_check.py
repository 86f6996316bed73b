"""Parity check between the training forward and the serving forward of a head, on one prompt.

Both run on the same hidden states of the target. The check compares these tensors of each draft
step in the order of computation: feature, key, value, inputs, query, attention, x, logits. It
reports the first one that differs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.engine.heads import DraftHead, FeatureProjection, load_feature_projection, load_head
from outrider.engine.training.data import (
    ChatTokenizer,
    PackShape,
    TokenIdArray,
    TrainingBatch,
    TrainingSample,
    make_batch,
)
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.target import TrainingTarget, load_target
from outrider.engine.training.unrolled_forward import Trace, UnrolledForward, make_labels

logger = logging.getLogger(__name__)

_STEPS = 5


HeadPair = tuple[DraftHead, FeatureProjection]
"""Draft head and feature projection of one checkpoint."""


@dataclass(frozen=True, slots=True)
class ParityDifference:
    """The first tensor that differs between the two forwards: its draft step, its name and the
    largest absolute difference."""

    step: int
    name: str
    largest: float


class _Recorder(Trace):
    """Stores the traced tensors of a batch of one row, without the batch dimension."""

    is_enabled = True

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, str], Tensor] = {}

    def add(self, step: int, name: str, value: Tensor) -> None:
        self.tensors[step, name] = value[0].detach()


def check_parity(
    target_dir: Path, head_dir: Path, prompt: str, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Compare the training and the serving forward of a head on one prompt, and log the result.
    Return 0 if all tensors agree within the tolerance, otherwise 1."""
    target = load_target(target_dir, dtype=dtype, device=device)
    ids = ChatTokenizer(target_dir).encode_turns([prompt])[0]
    head = load_head(
        head_dir,
        embedding=target.embedding,
        lm_head=target.lm_head,
        num_target_layers=target.config.num_layers,
        dtype=dtype,
        device=device,
    )
    projection = load_feature_projection(
        head_dir, num_target_layers=target.config.num_layers, dtype=dtype, device=device
    )
    found = compare_forwards(target, load_trainable(head_dir, head), head, projection, ids)
    if found is None:
        logger.info("all tensors are equal over %d draft steps", _STEPS)
        return 0
    logger.error("draft step %d: %r differs by up to %.3g", found.step, found.name, found.largest)
    return 1


def load_trainable(head_dir: Path, head: DraftHead) -> TrainableHead:
    """Load the weights of a checkpoint directly, without the serving loader, into a TrainableHead.
    `head` is the loaded serving head, which has the configuration. Raises ValueError for EAGLE-1/2
    heads and for EAGLE-3 heads with biases, additional norms or `norm_before_residual`."""
    config = head.config
    unsupported = (
        config.fc_norm,
        config.norm_before_fc,
        config.norm_output,
        config.norm_before_residual,
        config.fc_bias,
        config.qkv_bias,
        config.kind != "eagle3",
    )
    if any(unsupported):
        raise ValueError("the check covers plain EAGLE-3 heads only (no variant flags, no biases)")
    stored = load_file(head_dir / "model.safetensors")
    trainable = TrainableHead(config, head.target_ids)
    with torch.no_grad():
        for name, parameter in trainable.named_parameters():
            parameter.copy_(stored[name.replace("__", ".")].float())
    return trainable.to(head.target_ids.device)


@torch.no_grad()
def compare_forwards(
    target: TrainingTarget,
    trainable: TrainableHead,
    head: DraftHead,
    projection: FeatureProjection,
    ids: TokenIdArray,
) -> ParityDifference | None:
    """Run the training and the serving forward over the token ids, drafting from every position.
    Return the first difference between their tensors, or None if there is none."""
    sample = TrainingSample(ids[:1], ids[1:])
    shape = PackShape(rows=1, row_len=len(ids), selected_len=len(ids) - 1)
    batch = make_batch([sample], [[0]], shape).to(target.device)
    final, taps = target.forward(
        batch.ids_BS, batch.positions_BS, batch.attention_mask(), trainable.config.tap_layers
    )
    recorder = _Recorder()
    forward = UnrolledForward(trainable, target.embedding, dtype=target.embedding.dtype)
    steps = min(_STEPS, len(ids) - 2)
    forward(batch, taps, make_labels(trainable, target, final, batch), steps, recorder)
    served = run_serving_head(head, projection, batch, taps, steps)
    tolerance = 1e-4 if taps.dtype in (torch.float32, torch.float64) else 5e-2
    for (step, name), value in recorder.tensors.items():
        other = served[step, name]
        rows = min(len(value), len(other))
        value, other = value[:rows].double(), other[:rows].double()
        worst = float((value - other).abs().max()) if rows else 0.0
        if not worst <= tolerance * max(1.0, float(value.abs().max())):
            return ParityDifference(step, name, worst)
    return None


def run_serving_head(
    head: DraftHead, projection: FeatureProjection, batch: TrainingBatch, taps: Tensor, steps: int
) -> dict[tuple[int, str], Tensor]:
    """Run the serving head with a simple attention. Return a dict from (draft step, name) to each
    intermediate tensor.

    Step j reads the true token j positions after the one that step 0 reads. It leaves out the last
    j roots, for which this token does not exist.
    """
    tokens, raw = batch.next_ids_BS[0], taps[0]
    size = len(tokens) - 1
    features = projection(raw)
    inputs = head.inputs(tokens, features)
    positions = torch.arange(len(tokens), device=tokens.device)
    keys, values = head.kv(inputs, features, positions)
    traced = {(0, "feature"): features, (0, "key"): keys, (0, "value"): values}
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    residual, inputs = head.residual(inputs, features)[:size], inputs[:size]
    for step in range(steps):
        rows = size - step
        at = positions[:rows] + step
        if step:
            inputs = head.inputs(tokens[step : step + rows], features[:rows])
            residual = head.residual(inputs, features[:rows])
            k, v = head.kv(inputs, features[:rows], at)
            own_keys, own_values = [*own_keys, k], [*own_values, v]
        query = head.query(inputs, at)
        attended = torch.stack(
            [
                _attend_row(
                    query[i],
                    torch.cat([keys[: i + 1], *(k[i : i + 1] for k in own_keys)]),
                    torch.cat([values[: i + 1], *(v[i : i + 1] for v in own_values)]),
                )
                for i in range(rows)
            ]
        )
        features = head.finish(residual, attended)
        parts = (inputs, query, attended, features, head.logits(features))
        for name, value in zip(("inputs", "query", "attention", "x", "logits"), parts, strict=True):
            traced[step, name] = value
    return traced


def _attend_row(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention output of one query [nq, hd] over keys and values [L, nkv, hd]. The
    softmax is computed at least in fp32."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query, keys) * query.shape[-1] ** -0.5
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.einsum("hl,lhd->hd", scores.to(wide).softmax(-1).to(values.dtype), values)
