"""Feature projection of a draft head, run by the verifier: target features to the head's width."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.heads.layers import Linear, rms_norm


class FeatureProjection:
    """Maps hidden states of the target, [N, num_taps * Ht], to features [N, H].

    Shapes: N rows, Ht hidden size of the target, H hidden size of the head. The hidden states of
    `num_taps` layers are concatenated from the lowest layer to the highest. For kind `eagle` the
    projection is the identity, because that head reads only the target's hidden state after the
    final norm.
    """

    def __init__(
        self,
        config: HeadConfig,
        fc: Linear | None,
        fingerprint: str,
        *,
        norm_weights: tuple[Tensor, ...] = (),
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.tap_layers = config.tap_layers
        self.hidden_size = config.hidden_size
        self._width = config.num_taps * config.target_hidden_size
        self._fc = fc
        self._norm_weights = norm_weights

    def __call__(self, raw: Tensor) -> Tensor:
        if raw.shape[-1] != self._width:
            raise ValueError(f"features must be {self._width} wide, not {raw.shape[-1]}")
        if self._fc is None:
            return raw
        return self._fc(self._normed(raw))

    def _normed(self, raw: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        if self.config.norm_before_fc:
            return rms_norm(raw, self._norm_weights[0], eps)
        if self.config.fc_norm:
            parts = raw.chunk(self.config.num_taps, dim=-1)
            normed = [rms_norm(p, w, eps) for p, w in zip(parts, self._norm_weights, strict=True)]
            return torch.cat(normed, dim=-1)
        return raw


def projection_fingerprint(config: HeadConfig, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 hex digest of the head's kind, hidden size, tapped layers (the layers of
    the target whose hidden states it reads) and stored projection tensors.

    The digest is computed before any dtype conversion, so drafter and verifier get the same digest
    even if they use different dtypes.
    """
    digest = hashlib.sha256()
    digest.update(f"{config.kind}:{config.hidden_size}:{config.tap_layers}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
