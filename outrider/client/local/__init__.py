"""Runs a router, verifiers and drafters as processes on this machine.

certificates.py            `outrider certs`: creates certificates for small fleets.
child_process.py           Child processes and their ready line.
cluster.py                 Starts and stops the processes on this machine.
config.py                  Configuration of the processes on this machine.
health_probe.py            Health of a child process: what its health service answers, and how long
                           it has not answered.
model_files.py             Finds a model and its head on disk.
parent_watch.py            Runs a module that ends with its parent.
preflight.py               Checks of all model files before a process is started.
process_flags.py           Command lines of the processes on this machine.
readiness.py               Waits until a local fleet is ready.
settings_check.py          Settings of the processes of one machine, checked before any of them is
                           started.
supervisor.py              Restarts processes of this machine that end, fall silent or do not serve
                           any more.
"""
