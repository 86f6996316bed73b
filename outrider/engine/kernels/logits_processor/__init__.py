"""Logits processor on the device: penalties, biases, bans, grammars, top-k, top-p and min-p.

`process` defines the result. The kernels of `penalties`, `truncation` and `cutoff_mask` run in this
order.

cutoff_mask.py             Last kernel of the logits processor: sets the logits of removed tokens to
                           -inf.
draft_path.py              Draft tokens on the path to a row, which penalties count as output.
launch.py                  Launch of the logits-processor kernels (`penalties`, `truncation`,
                           `cutoff_mask`).
penalties.py               Kernels for penalties, logit biases, bans and grammar masks, and for
                           token counts.
process.py                 Logits processor on the device, in place, with its PyTorch reference.
token_masks.py             Allowed-token mask lookup in kernels, over
                           `session_tensors.AllowedTokenBits`.
truncation.py              Kernels of top-k, top-p and min-p truncation, exact to the bit.
"""
