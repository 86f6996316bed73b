"""Everything that faces drafters: proposals received, verdicts and features sent, drafter health.
It may import `state`.

drafter_health.py          Health of each drafter: response times, invalid messages, rate limits.
feature_store.py           Hidden-state features of live sessions in host memory.
message_checks.py          Validates every message received from a drafter.
message_pool.py            Received proposal messages held within a memory budget.
proposal_inbox.py          Bounded store of proposals, found by prefix digest.
session_announcer.py       Announces sessions to attached drafters and withdraws them.
shm_channels.py            Shared-memory channels to drafters on the same host.
shm_features.py            Features that the GPU wrote into shared memory, sent without a copy.
verdict_builder.py         Builds the verdicts sent to drafters from committed tokens.
"""
