"""The engine thread: scheduling, running and accounting of rounds. It may import everything but
`server`.

core.py                    EngineCore: state of all sessions, and how commands change it.
drafter_reassignment.py    Moves a running session to another drafter.
early_proposals.py         Fast path: next round when all proposals arrived early.
failure_handler.py         Ends sessions after a failed round or a lost device.
in_flight_round.py         InFlightRound: a round that was submitted and has not finished.
loop.py                    The engine thread: takes commands, runs rounds, emits effects.
proposal_intake.py         Takes drafters' messages into the inbox and the statistics.
round_executor.py          Plans, submits and finishes rounds.
round_reporter.py          Statistics, events and features of a finished round.
round_storage.py           Stores features and prefix K/V of a finished round.
schedule_policy.py         Pure scheduling rules: which rows form the next round.
scheduler.py               Scheduler: picks the rows of the next round from the core's state.
scheduler_inputs.py        Builds the scheduler's view of each running session.
speculation_switch.py      Pauses and resumes speculation of sessions as the policy decides.
"""
