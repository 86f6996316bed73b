"""The life of a request: validation, journal, verifier sessions, output, resumption, failover. It
may import `base`, `admission` and `fleet`.

drafter_rebalancer.py      Moves running sessions between drafters.
durable_log.py             On-disk log of resumable requests.
failover.py                Decides what happens to a request whose session was lost.
finished_requests.py       Logs and counts finished requests.
grammar_check.py           Compiles a request's grammar before it is queued.
intake.py                  Validates a request and opens its journal entry.
log_records.py             Record format of the on-disk log.
output_assembler.py        Detokenizes a session's output and applies stop strings.
request.py                 ValidatedRequest: a request after defaults and checks.
request_options.py         Sampling parameters, plan and lengths from request options.
request_runner.py          Runs a request over one or several verifier sessions.
request_spans.py           OpenTelemetry spans of requests.
resumable_answers.py       Answers that clients can resume after a broken connection.
resumable_requests.py      Runs resumable requests in their own tasks.
running_requests.py        Journal of running requests and their emitted tokens.
service.py                 RouterService: the life of a request.
session_output.py          Turns a session's events into messages for the client.
spec_counters.py           Speculation counters of one request.
stop_checker.py            Where the answer of a request ends by a stop string, found as its ids
                           arrive.
verifier_streams.py        One session stream to each verifier.
wakeup_pacer.py            Batches the wakeups of stream readers under load.
"""
