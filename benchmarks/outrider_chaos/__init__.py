"""Seeded runs of a whole fleet under faults, in one process or in several: `outrider chaos`.

__main__.py                Command `outrider chaos`: run a fleet under faults and check texts and
                           guarantees.
allowed_errors.py          Errors that a client may receive under a schedule.
clients.py                 Clients of a run: each sends one request over its own link and records
                           the history.
fault_injector.py          Fault injector: applies the faults of a schedule to a fleet and its
                           clients.
fleet.py                   Fleet in one process, with its clients behind TCP proxies.
fuzz_runner.py             Fuzz runner: fuzzes every decoder in worker processes and checks their
                           memory.
killable_parts.py          Verifier and drafter that can be killed, hung and restarted inside one
                           process.
killable_router.py         Router that can be killed and restarted inside one process.
leak_check.py              Leak check: tasks, threads and files that a run did not release.
live_run.py                Load and faults against a running fleet of local processes, given by
                           their ids.
parent_watch.py            Ends a process spawned by `multiprocessing` when its parent is gone.
process_fleet.py           Fleet of real processes behind TCP proxies, for real kills, stops and bad
                           links.
schedule_run.py            One run of a schedule: fleet, clients, faults and the final checks.
seed_runs.py               Runs many seeds in processes, replays one, and shrinks a failing
                           schedule.
tiny_models.py             Tiny random checkpoints in the real formats, for tests of distributions
                           and faults.
"""

from __future__ import annotations
