"""Load, preemption, restarts and faults of a running fleet.

exchange_faults.py         `outrider bench exchange-faults`: faults of a device exchange while
                           clients stream answers.
overload.py                `outrider bench load`: concurrent streams, first with a session for each,
                           then with too short a queue.
preemption.py              `outrider bench preemption`: one verifier with fewer KV blocks than its
                           sessions need.
recovery.py                `outrider bench recovery`: stream pauses while processes are killed,
                           stopped and drained.
repair.py                  Repair of a fleet after faults: restart of processes, and waits until the
                           router sees them again.
resource_usage.py          Resource usage of a fleet: sessions, blocks, requests, file descriptors
                           and memory.
rolling.py                 `outrider bench rolling`: rolling restart of all processes of a fleet
                           under load.
soak.py                    `outrider bench soak`: long run with many concurrent streams, which
                           reports errors and memory growth.
stress.py                  `outrider bench stress`: requests that are cancelled, time out or are
                           never read.
"""
