"""Runs a router, verifiers and drafters as processes on this machine.

certificates.py            `outrider certs`: makes a CA and a certificate for each role, for small
                           fleets and tests.
child_process.py           Child processes that print {"event": "ready", "address": ...} on stdout
                           when they serve.
cluster.py                 Local cluster: starts router, verifiers and drafters on this machine, and
                           stops them.
config.py                  Configuration of a local fleet: router, verifiers and drafters on this
                           machine.
health_probe.py            Health probes of a child process: answers of its health service, and how
                           long it was silent.
model_files.py             Resolution of a model and its draft head, by directory, known name or
                           hub id, to local files.
parent_watch.py            Runs a module as a child process that ends with its parent.
preflight.py               Preflight checks of all model files, before any process is started.
process_flags.py           Command lines of the processes on this machine, and their placement on
                           devices.
readiness.py               Readiness of a local fleet: checks of hosts and ports, and the wait for a
                           healthy router.
settings_check.py          Settings check of a local fleet, before any of its processes is started.
supervisor.py              Supervisor of the local processes: restarts those that end, fall silent
                           or stop serving.
"""
