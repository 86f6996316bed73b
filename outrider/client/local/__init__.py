"""Runs a router, verifiers and drafters as processes on this machine.

certificates.py            `outrider certs`: makes a CA and a certificate for each role, for small
                           fleets and tests.
child_process.py           Child processes that print {"event": "ready", "address": ...} on stdout
                           when they serve.
cluster.py                 Local cluster: starts router, verifiers and drafters on this machine, and
                           stops them.
config.py                  Configuration of a local fleet: router, verifiers and drafters on this
                           machine.
health_probe.py            Health probes of a child process: its health service is asked repeatedly
                           whether it serves.
model_files.py             Finds the local files of a model and its draft head, given as directory,
                           known name or hub id.
parent_watch.py            Runs a module as a child process that ends with its parent.
preflight.py               Checks of all model files before any process is started.
process_flags.py           Builds the command lines of the processes on this machine, and assigns
                           the processes to devices.
readiness.py               Checks the hosts and ports of a local fleet, and waits until its router
                           is healthy.
settings_check.py          Checks the settings of a local fleet before any of its processes is
                           started.
supervisor.py              Supervises the local processes: restarts those that end, fall silent or
                           stop serving.
"""
