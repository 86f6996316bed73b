"""The engine thread: scheduling, running and accounting of rounds. It may import everything but
`server`.

core.py                    EngineCore: the state of all sessions, and how commands change it;
                           engine thread only.
draft_recovery.py          DraftRecovery: gives sessions drafts between devices that have none, or
                           have them no more.
drafter_reassignment.py    Moves a running session to another drafter, or to none; its text and KV
                           stay as they are.
failure_handler.py         Ends sessions after a failed round or a lost device; engine thread only.
in_flight_round.py         InFlightRound: a submitted, unfinished round; and helpers that make its
                           rows.
loop.py                    The engine thread: takes commands, runs rounds, and has the outbox
                           flushed.
outbox.py                  Outbox: effects that the engine thread has posted and not yet handed
                           over; engine thread only.
proposal_intake.py         Takes drafters' messages into the proposal inbox and their health
                           statistics.
round_executor.py          Plans, submits and finishes rounds over the core's sessions; engine
                           thread only.
round_reporter.py          Accounts for finished rounds, and stores what others may need of them;
                           engine thread only.
schedule_policy.py         Scheduling policy: picks decode rows and prefill chunks of the next
                           round, or a time to wait.
scheduler.py               Scheduler: plans the next round from the running sessions, and turns
                           speculation on and off before it.
"""
