"""Common interface of EAGLE heads and small models on the GPU.

Letters in shapes: L layers; G key/value heads; S KV pool slots; d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from outrider.engine.device.drafting.draft_forward import DraftForward, DraftVocabulary
from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.drafting.small_model_forward import ModelForward
from outrider.engine.heads import DraftHead
from outrider.engine.target import TargetModel
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS, KVShape
from outrider_drafter.gpu.shapes import MODEL_BUCKETS, Buckets
from outrider_drafter.proposers.kv_proposer import RowInputs

MakeForward = Callable[[Tensor, int], DraftForward]
"""Function that builds the forward pass of a draft model. Its arguments are the KV storage [2, L,
G, S, d] and the maximum number of KV rows of a session."""


class GpuDraftModel(NamedTuple):
    """Description of an EAGLE head or small model, from which a proposer allocates KV memory on the
    GPU and builds the forward pass."""

    feed: RowInputs
    kv: KVShape
    vocabulary: DraftVocabulary
    max_context: int
    """Maximum number of positions that the model supports."""
    forward: MakeForward
    buckets: Buckets


def make_eagle_model(head: DraftHead, buckets: Buckets | None = None) -> GpuDraftModel:
    """Return the GPU draft model of an EAGLE head. `buckets`: sizes of the captured graphs; None
    for the default sizes. Raises FailedPreconditionError if the head is not an EAGLE-3 head or if
    its weights are packed for CPUs (see `PackedLinear`)."""
    weights, config = HeadWeights.from_head(head), head.config

    def forward(storage: Tensor, max_len: int) -> DraftForward:
        return HeadForward(weights, storage=storage, block_tokens=BLOCK_TOKENS, max_len=max_len)

    return GpuDraftModel(
        feed=RowInputs.of_head(head),
        kv=KVShape(1, config.num_kv_heads, config.head_dim),
        vocabulary=DraftVocabulary(weights.target_ids, weights.draft_columns),
        max_context=config.max_position_embeddings,
        forward=forward,
        buckets=buckets or Buckets(),
    )


def make_small_model(model: TargetModel, vocab_size: int) -> GpuDraftModel:
    """Return the GPU draft model of a small model, for a target with `vocab_size` token ids."""
    config = model.config

    def forward(storage: Tensor, max_len: int) -> DraftForward:
        return ModelForward(
            model,
            vocab_size=vocab_size,
            storage=storage,
            block_tokens=BLOCK_TOKENS,
            max_len=max_len,
        )

    return GpuDraftModel(
        feed=RowInputs(),
        kv=KVShape(config.num_layers, config.num_kv_heads, config.head_dim),
        vocabulary=DraftVocabulary.identity(vocab_size, model.device),
        max_context=config.max_position_embeddings,
        forward=forward,
        buckets=MODEL_BUCKETS,
    )
