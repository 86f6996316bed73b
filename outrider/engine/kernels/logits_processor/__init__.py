"""The warper on the device: `logits` says what is computed, `edit` and `cut` run in this order.

cutoff_mask.py             Writes -inf below the cut-off.
draft_path.py              Draft tokens that count as output for penalties.
launch.py                  Launches of the logits-processor kernels.
penalties.py               Penalty, bias, ban and grammar kernels.
process.py                 Processes logits on the GPU, with the PyTorch reference.
token_masks.py             Reads allowed-token masks in kernels.
truncation.py              Top-k, top-p and min-p kernels.
"""
