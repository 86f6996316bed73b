"""The verifier process: hosts the target model and decides which draft tokens stand.

    service.py   the VerifierEndpoint (asyncio thread): control calls, event streams, exchange
    drafters.py  exchange connections: hello checks, bounded outgoing queues, heartbeats
    loop.py      the engine thread: takes commands, runs rounds, hands outputs to asyncio
    core.py      the state of all sessions and what commands do to it (engine thread only)
    schedule.py  pure: which rows form the next round, or how long to wait
    preemption.py  pure: which sessions hold K/V, and who loses it for whom
    room.py      does that between rounds: lets in, grows, preempts, resumes
    engine.py    one round: batch, forward, accept, commit
    rows.py      pure: depth limits and trimming of proposals, verify rows
    handover.py  verdicts: what drafters are told of a round, and when they are caught up
    accounts.py  what a settled round is worth: statistics, events, features that are kept
    moving.py    a session goes to another drafter
    inbox.py     pure: bounded store of proposals, found by the digests of their prefixes
    kept.py      pure: the messages that these are entries of, within a budget
    features.py  bounded store of projected features, for catching drafters up
    sessions.py  the state of one session
    effects.py   what the core wants done outside: events, messages, errors

The service posts commands to the loop; the loop drives the core and the round engine and posts
effects back, one hand-off a round.
"""

from outrider.compiled import require_one_build

require_one_build(__file__)
