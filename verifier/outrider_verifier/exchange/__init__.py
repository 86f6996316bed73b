"""Communication with drafters: received proposals, sent verdicts and features, and drafter health.
It may import `state`.

device_exchange.py         Manages the exchange of drafts and features with a drafter on another
                           device of this host. Engine thread only.
drafter_health.py          Health of each drafter: response times, invalid messages, timeouts, rate
                           limits.
feature_store.py           Projected features of live sessions in host memory, for drafters that
                           must catch up.
message_checks.py          Validates all messages received from drafters: the hello, then every
                           message after it.
proposal_inbox.py          ProposalInbox: bounded store of proposals by session and prefix digest.
session_announcer.py       Announces sessions to attached drafters, withdraws them, and sends their
                           messages.
shm_channels.py            Shared-memory channels to drafters on the same host, read and written by
                           the engine thread.
shm_features.py            Features that the GPU wrote into shared memory, sent to a drafter
                           without a copy.
verdict_builder.py         Builds session starts and verdicts for drafters from committed tokens,
                           live or replayed.
"""
