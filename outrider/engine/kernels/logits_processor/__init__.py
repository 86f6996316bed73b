"""The warper on the device: `logits` says what is computed, `edit` and `cut` run in this order."""
