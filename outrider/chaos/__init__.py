"""Fault injection: faults, links that inject them, and a checker of what clients received.

checker.py                 History checker: compares client histories with the answers of a
                           fault-free run.
faults.py                  Fault model: kinds, targets and times of injected faults.
frame_faults.py            Frame faults of a link: frames are dropped, duplicated, reordered,
                           corrupted or truncated.
fuzz.py                    Decoder fuzzer: malformed frames must yield a typed error or a message,
                           nothing else.
fuzz_shm.py                Shared-memory channel fuzzer: malformed packets, some with positions
                           outside the ring.
history.py                 Client history: the events that one client received, in order.
load.py                    Load on a running fleet: closed-loop clients whose answers are checked.
network.py                 Simulated in-process network whose links can be delayed, blocked, cut or
                           corrupted.
proxy.py                   TCP proxy between two processes that injects link faults.
report.py                  Report of a fault run against a fleet: counts, gaps, errors and
                           violations.
requests.py                Requests of a fault run: random combinations of fixed prompts, sampling
                           options and drafting options.
schedule.py                Fault schedule: faults, requests and fleet drawn from a seed, the only
                           source of randomness.
shrink.py                  Greedy minimisation of a failing schedule.
signals.py                 Faults that signals cause in local processes, given by process id: kill,
                           terminate and stop.
"""

from __future__ import annotations
