"""Seeded runs of a whole fleet under faults, in one process or in several: `outrider chaos`.

__main__.py                `outrider chaos`.
allowed_errors.py          Errors that a client may see under a schedule.
clients.py                 The clients of a run.
fault_injector.py          Injects the faults of a schedule.
fleet.py                   A whole fleet in this process, its clients behind proxies.
fuzz_runner.py             Fuzzes all decoders in several processes.
killable_parts.py          Verifier and drafter that can be killed within one process.
killable_router.py         Router that can be killed within one process.
leak_check.py              Tasks, threads and files that a run did not release.
live_run.py                Load and faults against a running fleet.
parent_watch.py            Ends a spawned process with its parent.
process_fleet.py           A fleet of real processes behind TCP proxies.
schedule_run.py            One run of a schedule: fleet, clients, faults, checks.
seed_runs.py               Runs many seeds and shrinks the failing ones.
tiny_models.py             Tiny random checkpoints.
"""

from __future__ import annotations
