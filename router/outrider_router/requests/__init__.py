"""The life of a request: validation, registry, verifier sessions, output, resumption, failover. It
may import `base`, `admission` and `fleet`.

answer_format.py           Format of the answers to chat requests: how they are parsed, and which
                           grammar enforces it.
chat_prompt.py             Conversations as the chat template reads them: messages, tools and
                           variables.
drafter_rebalancer.py      Rebalancer: moves running sessions off drafters that are lost, leaving or
                           overloaded.
failover.py                Failover policy: retry, finish or fail a request whose session was lost.
grammar_check.py           Grammar check: compiles a request's grammar before the request is queued.
intake.py                  Request intake: access check, validation and the registry entry of a new
                           request.
parsed_answer.py           Answer of a chat request, split into reasoning, content and tool calls
                           on its way to the client.
request.py                 Request validation: tokenizes a client's request, applies defaults and
                           checks limits.
request_accounting.py      Accounting of a finished request: metrics, log line and span.
request_output.py          Output of a request: its tokens, their text up to a stop string, and its
                           speculation counters.
request_run.py             Request run: serves one request to its end, on one or several verifier
                           sessions.
request_spans.py           OpenTelemetry spans of a request: the request, its queue waits and its
                           sessions.
resumption/                Resumable requests: their output, which a client can resume reading, and
                           the durable log by which they survive a restart of the router.
running_requests.py        Running requests: their lifecycle, sessions and emitted tokens, from
                           which a failover resumes.
service.py                 RouterService: the life of a request, from tokenizing and admission to
                           stream and cleanup.
session_output.py          Session output: turns the events of a verifier session into messages for
                           the client.
shared_results.py          Results that concurrent callers share: one computation for equal keys.
"""
