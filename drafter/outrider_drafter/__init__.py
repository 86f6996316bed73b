"""The drafter process: keeps draft models beside a verifier's sessions and proposes draft trees.

sessions    what is known of each session, and the checks of every verdict
growth      draft trees as pure state machines: chain, best-first beam, static shape
grow        drives growths of many sessions through one draft model, level by level
head_*      EAGLE heads: K/V buffers, attention, catch-up, steps
ngram       prompt lookup
small_model a separate small language model
engine      messages in, proposals out; single-threaded, no I/O
worker      the one drafting thread
service     connections to verifiers, and the control interface
"""
