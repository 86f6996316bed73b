"""Per-session state on the device, by slot.

free_slots.py              Free device slots.
logits_slots.py            Logits-processor state of each slot.
session_slots.py           Per-session state on the GPU.
"""
