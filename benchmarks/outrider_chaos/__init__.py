"""Seeded runs of a whole fleet under faults, in one process or in several: `outrider chaos`.

__main__.py                Command `outrider chaos`: run a fleet under faults and check texts and
                           guarantees.
allowed_errors.py          Errors that a client may receive under a schedule of faults.
clients.py                 Clients of a run: each sends one request over its own connection and
                           records a history of events.
fault_injector.py          Fault injector: injects the faults of a schedule into a fleet and its
                           clients.
fleet.py                   Fleet in one process, whose clients connect through TCP proxies.
fuzz_runner.py             Fuzz runner: fuzzes every decoder in worker processes and checks how much
                           their memory grows.
killable_parts.py          Verifier and drafter that can be killed and restarted inside one process.
killable_router.py         Router that can be killed and restarted inside one process.
leak_check.py              Leak check: tasks, threads and files that a run did not release.
live_run.py                Load and faults for a running fleet of local processes, which are given
                           by their process ids.
parent_watch.py            Watch that ends a process spawned by `multiprocessing` when its parent is
                           gone.
process_fleet.py           Fleet of real processes behind TCP proxies, for real signals and faults
                           of links.
schedule_run.py            One run of a fault schedule: the fleet, its clients, the faults and the
                           final checks.
seed_runs.py               Runs of many seeds in worker processes, replay of one seed, and shrinking
                           of a failing schedule.
tiny_models.py             Tiny random checkpoints in the usual formats, for tests of output
                           distributions and of faults.
"""

from __future__ import annotations
