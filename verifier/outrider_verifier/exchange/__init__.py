"""Communication with drafters: received proposals, sent verdicts and features, and drafter health.
It may import `state`.

device_exchange.py         Manages the exchange of drafts and features with a drafter on another
                           device of this host.
drafter_health.py          Health of each drafter: response times, invalid messages, timeouts, rate
                           limits.
feature_store.py           Projected features of live sessions in host memory, for drafters that
                           must catch up.
message_checks.py          Validates the messages received from drafters: first the hello message,
                           then all others.
proposal_inbox.py          ProposalInbox is a bounded store of proposals, indexed by session and
                           prefix digest.
session_announcer.py       Announces sessions to attached drafters, withdraws sessions, and sends
                           messages to drafters.
shm_channels.py            Shared-memory channels to drafters on the same host, read and written by
                           the engine thread.
shm_features.py            Features that the GPU wrote into shared memory, sent to a drafter
                           without a copy.
verdict_builder.py         Builds the messages that announce sessions to drafters, and the verdicts
                           that follow.
"""
