"""The life of a request: validation, registry, verifier sessions, output, resumption, failover. It
may import `base`, `admission` and `fleet`.

drafter_rebalancer.py      Rebalancer: moves running sessions off drafters that are lost, leaving or
                           overloaded.
failover.py                Failover policy: retry, finish or fail a request whose session was lost.
grammar_check.py           Grammar check: compiles a request's grammar before the request is queued.
intake.py                  Request intake: access check, validation and the registry entry of a new
                           request.
output_assembler.py        Output assembler: turns a session's token ids into text, cut at the first
                           stop string.
request.py                 Request validation: tokenizes a client's request, applies defaults and
                           checks limits.
request_accounting.py      Accounting of a finished request: metrics, log line and span.
request_lifecycle.py       Lifecycle of a request: its phases, the transitions between them, and
                           what a failure means in each.
request_options.py         Translates request options into sampling parameters, speculation plan and
                           token limits.
request_output.py          Output of a request: the tokens that verifiers have emitted for it, and
                           when.
request_run.py             Request run: serves one request to its end, on one verifier session or
                           several.
request_runner.py          Request runner: serves all requests of a router, and moves their sessions
                           off verifiers that are about to stop.
request_session.py         Session of a request on a verifier, and the drafter that drafts for it.
request_spans.py           OpenTelemetry spans of a request: the request, its queue waits and its
                           sessions.
resumption/                Resumable requests: their answers, which a client can take up again, and
                           the durable log by which they survive a restart of the router.
running_requests.py        Registry of the running requests and their emitted tokens, from which a
                           failover resumes.
service.py                 RouterService: the life of a request, from tokenizing and admission to
                           stream and cleanup.
session_output.py          Session output: turns the events of a verifier session into messages for
                           the client.
spec_counters.py           Speculation counters of one request, updated in place.
stop_checker.py            Stop checker: finds the token at which a stop string ends an answer, as
                           its ids arrive.
verifier_streams.py        Session streams to the verifiers: one each, opened for its first session.
wakeup_pacer.py            Wakeup pacer: wakes stream readers at once, or in batches while the
                           router is behind.
"""
