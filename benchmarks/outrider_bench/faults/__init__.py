"""Load, preemption, restarts and faults of a running fleet.

overload.py                Many concurrent streams and a full queue.
preemption.py              Preemption with fewer K/V blocks than sessions need.
recovery.py                Pauses of streams when processes are killed or stopped.
repair.py                  Restores a fleet after a fault.
resource_usage.py          Sessions, blocks, descriptors and memory held by a fleet.
rolling.py                 Rolling restart of all processes under load.
soak.py                    Long run with many streams: errors and memory growth.
stress.py                  Requests that are cancelled, late or never read.
"""
