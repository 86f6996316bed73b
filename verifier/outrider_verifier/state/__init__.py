"""Data that the other packages exchange: sessions, commands, effects, round plans. It imports no
other package of the verifier.

commands.py                Commands from the asyncio thread to the engine thread, which handles them
                           in order between rounds.
effects.py                 Effects: messages from the engine thread to the asyncio thread; a
                           round's verdicts come first.
preemption_mode.py         PreemptionMode: recompute or swap, the ways in which preempted sessions
                           get their KV back.
round_plan.py              Inputs of the scheduler (limits, estimates, row states) and its output,
                           `RoundPlan`.
session.py                 Session: tokens, KV, plan and phase of one served request. Engine thread
                           only.
session_phase.py           SessionPhase: the phases of a session on the verifier, and the allowed
                           transitions.
session_records.py         Parts of a session: its prefill progress, its preemptions, and its
                           drafter's failures.
simulated_acceptance.py    Parses the draft acceptance rates of --simulated-acceptance, for
                           benchmarks without weights.
"""
