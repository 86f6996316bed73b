"""Size limits of everything that a peer may send; a message beyond one is malformed."""

from __future__ import annotations

from outrider.spec.plan import MAX_DRAFT_TOKENS
from outrider.spec.sampling import LOWEST_LOGPROB as LOWEST_LOGPROB

MAX_MESSAGE_BYTES = 64 << 20
"""Default bound of one encoded message on every transport."""
MAX_BUNDLE_MESSAGES = 1024
"""Messages of one frame."""
MAX_BUNDLE_BYTES = 4 << 20
"""Size up to which messages are put into one frame; a larger message crosses alone."""
MAX_NODES = MAX_DRAFT_TOKENS
"""Nodes of a draft tree."""
MAX_ROUND_SESSIONS = 4096
"""Entries of one message of verdicts or proposals."""
MAX_HANDLES = 1 << 20
"""Session handles of a connection are below this."""
MAX_DISTRIBUTION_ENTRIES = 1 << 22
"""(id, count) pairs of all draft distributions of a message."""
MAX_VOCAB_SIZE = 1 << 24
MAX_SEQUENCE_LEN = 1 << 24
"""Tokens of a session, and of any token list."""
MAX_CHARACTERS = (1 << 32) - 1
"""Characters of an answer's text."""
MAX_FEATURE_WIDTH = 1 << 16
"""Feature values a token."""
MAX_STOP_TOKEN_IDS = 256
MAX_METHODS = 16
MAX_TOP_LOGPROBS = 20
"""Most probable ids that a request may ask for beside each emitted token."""
MAX_EVENT_LOGPROBS = 1 << 22
"""Log-probabilities of one message of events."""
MAX_PRIORITY = 100
"""Priorities are in [-100, 100]."""
MAX_PEERS = 4096
"""Drafters or verifiers listed in an info message."""
MAX_NAME_BYTES = 256
"""Ids, names, hashes and fingerprints."""
MAX_DECISION_BYTES = 64
"""A planner's decision in a session's statistics."""
MAX_PLANNER_BYTES = 4096
"""What a verifier says of its planner."""
MAX_ADDRESS_BYTES = 1024
MAX_EVENT_ROWS = 1 << 16
"""Sessions of one message of events."""
MAX_ERROR_BYTES = 8192
"""Text of a session's error, and of why a drafter refuses a replica."""
MAX_REPLICA_SLOTS = 1 << 16
"""Session slots of a replica, its padding slot left out."""
MAX_ROUND_ROWS = 1 << 16
"""Decode rows of a round that a replica follows."""
MAX_ROUND_CHUNKS = 1024
"""Prefill chunks of a round that a replica follows."""
MAX_CHUNK_TOKENS = 1024
"""Tokens of one of these prefill chunks."""
MAX_DRAFT_LENGTH = 64
"""Tokens of a draft chain of a replica."""
MAX_SLOT_ENTRIES = 4096
"""Entries of one draft distribution of a replica."""
MAX_EXCHANGE_DEPTH = 64
"""Rounds that a verifier may be ahead of a replica."""
MAX_FAN_OUT = 64
"""Outcomes of a round that a replica drafts for, a session."""
MAX_AHEAD_ROWS = 64
MAX_GPU_BYTES = 64
"""Decode rows of a round whose outcomes a replica drafts for."""
MAX_KV_BLOCKS = 1 << 24
"""KV blocks of a verifier's pool."""
MAX_BLOCK_TOKENS = 1024
"""KV slots of a block."""
MAX_TABLE_BLOCKS = 1 << 20
"""Blocks of a session's block table."""
