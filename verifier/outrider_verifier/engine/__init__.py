"""The engine thread: scheduling, running and accounting of rounds. It may import everything but
`server`.

core.py                    EngineCore holds the state of all sessions and applies commands to it.
draft_recovery.py          DraftRecovery starts or restores drafts by device exchange for running
                           sessions.
drafter_reassignment.py    Moves a running session to another drafter, or to none; its text and KV
                           stay as they are.
failure_handler.py         Ends sessions after a failed round or a lost device.
in_flight_round.py         InFlightRound is a round that was submitted and is not finished.
loop.py                    The engine thread: takes commands, runs rounds, hands effects to the
                           asyncio thread.
outbox.py                  Outbox collects the effects that the engine thread posts, until they are
                           passed on.
proposal_intake.py         Stores the proposals of drafters in the inbox and records the health of
                           drafters.
round_executor.py          Plans, submits and finishes rounds of the core's sessions.
round_reporter.py          Records statistics and events of finished rounds, and stores their
                           features and prefixes.
schedule_policy.py         Scheduling policy: chooses the decode rows and prefill chunks of the next
                           round, or a time to wait until.
scheduler.py               Scheduler plans the next round from the core's running sessions.
"""
