"""State of each session on the device, indexed by session slot.

free_slots.py              Free list of session slots.
logits_slots.py            Logits-processor state of each session slot: parameters and counts of
                           emitted tokens.
session_slots.py           Session slots: per-session state that the device keeps between rounds.
"""
