"""Number of KV tokens that fit into a CUDA device's memory. Pure functions."""

from __future__ import annotations

from outrider.errors import FailedPreconditionError

WORKSPACE_BYTES = 1 << 30
"""Left for activations and kernels' scratch."""
GRAPH_LAYER_BYTES = 200 << 10
"""What the graphs of a shape take for each layer of the target: of 32 layers 321 shapes took 1.8
GiB of an H200, and 115 with an in-process drafter .7."""
_LOGIT_COPIES = 3
"""The product's, a copy, and the list that the logits processor gathers."""
_FLOAT32_BYTES = 4


def reserved_bytes(
    *, decode_tokens: int, vocab_size: int, head_bytes: int, warp_bytes: int, graph_layers: int
) -> int:
    """What rounds need beside weights and KV: the logits of `decode_tokens` rows, a workspace, the
    weights of a head that is loaded later, what the sessions' logits processors remember, and the
    graphs of all shapes, of which each has the target's layers: so many `graph_layers`."""
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
    """Tokens of KV within `fraction` of a device, at most `max_tokens`.

    free_bytes: what is free with the weights loaded; bytes_per_token: KV of one token over all
    layers. Raises FailedPreconditionError if there is room for none.
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
