"""Outrider: speculative decoding with the drafter and the target in separate processes.

build_info.py              Detection of packages compiled by mypyc, and refusal to mix them with
                           others (decision 48).
errors.py                  Error tree: every error that can reach a client or a peer derives from
                           `OutriderError`.
extras.py                  Install hints for missing optional packages: maps each package to its pip
                           extra.
failure_event.py           Startup failure event of a process, one JSON line: {"event": "failed",
                           "reason": ...}.
ids.py                     Identifier types of requests, sessions, drafters, verifiers and tenants
                           (`NewType` of `str`).
logs.py                    JSON logging of the three processes: one object a line on stderr, never
                           prompts or token ids.
metrics_port.py            Prometheus port of a process: plain text on loopback, or TLS with
                           operator certificates.
process_metrics.py         Metrics that every process exports from its start: state, build, and use
                           of CPU and memory.
process_tuning.py          Runtime tuning of a process: event loop (uvloop), garbage collector,
                           allocator, OpenMP.
signals.py                 Signals that make a process drain and exit: SIGTERM, SIGINT and SIGHUP.
spans.py                   OpenTelemetry tracing: spans of sampled requests across router, verifier
                           and drafter.
start_times.py             Measures the stages of a process's start, and logs their durations when
                           the process is ready.
timeline.py                Timeline recorder: the work of each thread of this process, in Trace
                           Event Format (Perfetto).
watchdog.py                Watchdog of a process's worker thread: detects pending work without a
                           finished step.
"""

__version__ = "0.2.0"
