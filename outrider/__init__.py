"""Outrider: speculative decoding with the drafter and the target in separate processes.

build_info.py              Whether an installation's host side is compiled (decision 48).
errors.py                  The one error tree.
extras.py                  What to install where a part of Outrider needs a package that is not
                           there.
failure_event.py           The last event of a process that cannot start: {"event": "failed",
                           "reason": ...}.
ids.py                     Distinct identifier types, so that a session id cannot be passed where a
                           drafter id is meant.
logs.py                    Logs of the three processes.
metrics_port.py            The Prometheus port of a process.
process_tuning.py          What Outrider's processes do to themselves.
signals.py                 The signals that ask one of Outrider's processes to drain and end.
spans.py                   OpenTelemetry spans of requests, over all three processes.
timeline.py                Timeline of the process's threads in Trace Event Format.
watchdog.py                A watchdog over the worker thread of a process: work waits, and the
                           thread finishes none of it.
"""

__version__ = "0.1.0"
