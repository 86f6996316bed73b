"""The engine thread: scheduling, running and accounting of rounds. It may import everything but
`server`.

core.py                    EngineCore holds the state of all sessions and changes it by commands;
                           engine thread only.
draft_recovery.py          DraftRecovery starts or restores drafts by device exchange for running
                           sessions.
drafter_reassignment.py    Moves a running session to another drafter, or to none; its text and KV
                           stay as they are.
failure_handler.py         Ends sessions after a failed round or a lost device; engine thread only.
in_flight_round.py         InFlightRound: a round that was submitted and is not finished; and
                           functions that build rows.
loop.py                    The engine thread: takes commands, runs rounds, hands effects to the
                           asyncio thread.
outbox.py                  Outbox: the effects that the engine thread has posted and not yet handed
                           over; engine thread only.
proposal_intake.py         Takes drafters' messages into the proposal inbox and their health
                           statistics.
round_executor.py          Plans, submits and finishes rounds over the core's sessions; engine
                           thread only.
round_reporter.py          Accounts for finished rounds, and stores their features and prefixes;
                           engine thread only.
schedule_policy.py         Scheduling policy: picks decode rows and prefill chunks of the next
                           round, or a time to wait.
scheduler.py               Scheduler plans the next round from the core's running sessions.
"""
