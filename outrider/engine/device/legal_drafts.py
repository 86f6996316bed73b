"""What grammars allow of a head's logits.

B rows, Vd draft vocabulary, W words of 32 target ids.
"""

from __future__ import annotations

import math

from torch import Tensor


def only_legal(logits: Tensor, bits: Tensor, ids: Tensor) -> Tensor:
    """Logits float32 [B, Vd], -inf where the bits int32 [B, W] of a row do not have the target id
    (ids: integer [Vd]) of a column; a row of which they have none is left as it is."""
    words = bits.index_select(1, ids.long() >> 5)
    legal = ((words >> (ids & 31).int()) & 1) != 0
    kept = legal | ~legal.any(dim=1, keepdim=True)
    return logits.float().masked_fill(~kept, -math.inf)
