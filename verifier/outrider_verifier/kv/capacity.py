"""Number of KV tokens that fit into a CUDA device's memory. Pure functions."""

from __future__ import annotations

from outrider.errors import FailedPreconditionError

WORKSPACE_BYTES = 1 << 30
"""Bytes reserved for activations and for the scratch memory of kernels."""
GRAPH_LAYER_BYTES = 200 << 10
"""Bytes that the CUDA graphs of one round shape take per layer of the target. Measured on an H200
with 32 layers: 1.8 GiB for 321 shapes, and 0.7 GiB for 115 shapes with an in-process drafter."""
_LOGIT_COPIES = 3
"""Simultaneous copies of the logits: the output of the matrix product, a copy, and the logits that
the logits processor gathers."""
_FLOAT32_BYTES = 4


def reserved_bytes(
    *, decode_tokens: int, vocab_size: int, head_bytes: int, warp_bytes: int, graph_layers: int
) -> int:
    """Return the bytes that rounds need besides weights and KV: the logits of `decode_tokens` rows,
    a workspace, the weights of a draft head that is loaded later (`head_bytes`), the state of
    logits processors (`warp_bytes`), and CUDA graphs. `graph_layers` is the number of target layers
    in all graphs together."""
    logits = _LOGIT_COPIES * _FLOAT32_BYTES * decode_tokens * vocab_size
    graphs = GRAPH_LAYER_BYTES * graph_layers
    return WORKSPACE_BYTES + graphs + logits + head_bytes + warp_bytes


def max_kv_tokens(
    *,
    free_bytes: int,
    total_bytes: int,
    fraction: float,
    reserved: int,
    bytes_per_token: int,
    max_tokens: int,
) -> int:
    """Return the number of KV tokens that fit if only `fraction` of a device's memory may be used,
    but at most `max_tokens`.

    `total_bytes` is the device's memory, and `free_bytes` the part that is free after the weights
    were loaded. `reserved` is the memory to keep for rounds (see `reserved_bytes`).
    `bytes_per_token` is the size of the KV of one token in all layers. Raise
    FailedPreconditionError if not even one token fits.
    """
    used = total_bytes - free_bytes
    budget = int(total_bytes * fraction) - used - reserved
    tokens = min(budget // bytes_per_token, max_tokens)
    if tokens < 1:
        raise FailedPreconditionError(
            f"no memory is left for KV: of {total_bytes >> 20} MiB, {fraction:.0%} may be used, "
            f"{used >> 20} MiB are in use and {reserved >> 20} MiB are needed by rounds",
            reason="NO_DEVICE_MEMORY",
        )
    return tokens
