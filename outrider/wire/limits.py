"""Size limits of everything that a peer may send.

A message that exceeds a limit is malformed.
"""

from __future__ import annotations

from outrider.spec.plan import MAX_DRAFT_TOKENS
from outrider.spec.sampling import LOWEST_LOGPROB as LOWEST_LOGPROB

MAX_MESSAGE_BYTES = 64 << 20
"""Largest size in bytes of one encoded message, on every transport. `GrpcConfig` can reduce it."""
MAX_BUNDLE_MESSAGES = 1024
"""Largest number of messages in one frame."""
MAX_BUNDLE_BYTES = 4 << 20
"""Size in bytes up to which messages are joined into one frame. A larger message gets a frame of
its own.
"""
MAX_NODES = MAX_DRAFT_TOKENS
"""Largest number of nodes in a draft tree."""
MAX_ROUND_SESSIONS = 4096
"""Largest number of entries in one message of verdicts or proposals."""
MAX_HANDLES = 1 << 20
"""Exclusive upper limit of the session handles of a connection."""
MAX_DISTRIBUTION_ENTRIES = 1 << 22
"""Largest total number of entries in all draft distributions of a message."""
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQUENCE_LEN = 1 << 24
"""Largest number of tokens in a session and in any list of tokens."""
MAX_CHARACTERS = (1 << 32) - 1
"""Largest number of characters in an answer."""
MAX_FEATURE_WIDTH = 1 << 16
"""Largest number of feature values per token."""
MAX_STOP_TOKEN_IDS = 256
MAX_METHODS = 16
MAX_TOP_LOGPROBS = 20
"""Largest value of `top_logprobs` in a request."""
MAX_EVENT_LOGPROBS = 1 << 22
"""Largest number of log-probabilities in one message of events."""
MAX_PRIORITY = 100
"""Largest priority of a request. Priorities are in [-MAX_PRIORITY, MAX_PRIORITY]."""
MAX_PEERS = 4096
"""Largest number of drafters or verifiers in an info message."""
MAX_NAME_BYTES = 256
"""Largest size in bytes of ids, names, hashes and fingerprints."""
MAX_DECISION_BYTES = 64
"""Largest size in bytes of a planner decision in a session's statistics."""
MAX_PLANNER_BYTES = 4096
"""Largest size in bytes of the planner decisions in a verifier's info."""
MAX_ADDRESS_BYTES = 1024
MAX_EVENT_ROWS = 1 << 16
"""Largest number of sessions in one message of events."""
MAX_PROBLEM_BYTES = 1024
"""Largest size in bytes of the reason for which a router does not use a peer."""
MAX_ERROR_BYTES = 8192
"""Largest size in bytes of a session's error message, and of a drafter's reason to refuse a
replica.
"""
MAX_REPLICA_SLOTS = 1 << 16
"""Largest number of session slots of a replica, not counting the slot of padding rows."""
MAX_ROUND_ROWS = 1 << 16
"""Largest number of decode rows in a round of a replica."""
MAX_ROUND_CHUNKS = 1024
"""Largest number of prefill chunks in a round of a replica."""
MAX_CHUNK_TOKENS = 1024
"""Largest number of tokens in a prefill chunk of a replica."""
MAX_DRAFT_LENGTH = 64
"""Largest number of tokens in a draft chain of a replica."""
MAX_SLOT_ENTRIES = 4096
"""Largest number of entries in a draft distribution of a replica."""
MAX_EXCHANGE_DEPTH = 64
"""Largest number of rounds by which a verifier may be ahead of a replica."""
MAX_FAN_OUT = 64
"""Largest number of outcomes per session and round for which a replica makes drafts."""
MAX_AHEAD_ROWS = 64
"""Largest number of decode rows in a round for which a replica uses look-ahead."""
MAX_GPU_BYTES = 64
"""Largest size in bytes of the UUID of a GPU."""
MAX_KV_BLOCKS = 1 << 24
"""Largest number of KV blocks in a verifier's pool."""
MAX_BLOCK_TOKENS = 1024
"""Largest number of KV slots (tokens) in a block."""
MAX_TABLE_BLOCKS = 1 << 20
"""Largest number of blocks in a session's block table."""
