"""Load, preemption, restarts and faults of a running fleet.

exchange_faults.py         `outrider bench exchange-faults`: faults of an exchange between devices,
                           under streams.
overload.py                `outrider bench load`: 64 concurrent streams complete; a full queue
                           refuses the rest.
preemption.py              `outrider bench preemption`: one verifier with fewer KV blocks than its
                           sessions need.
recovery.py                `outrider bench recovery`: stream pauses while processes are killed,
                           stopped and drained.
repair.py                  Fleet repair after faults: restarts processes and waits until the router
                           sees them again.
resource_usage.py          Resource usage of a fleet: sessions, blocks, requests, file descriptors
                           and memory.
rolling.py                 `outrider bench rolling`: rolling restart of all processes of a fleet
                           under load.
soak.py                    `outrider bench soak`: long run with many concurrent streams; no errors,
                           no memory growth.
stress.py                  `outrider bench stress`: requests that are cancelled, time out or are
                           never read.
"""
