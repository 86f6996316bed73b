"""The router: faces clients, places sessions, plans speculation, hides the loss of a drafter.

Who drives whom:

    __main__    parses flags, builds the parts, serves, drains on SIGTERM
    service     one coroutine a request: tokenize -> admit -> open session -> stream -> free
    admission   bounded queue and KV ledger; `plan` decides, `AdmissionQueue` acts
    fleet       pure: handshakes, attachments
    pool        pure: which drafter drafts for which session, and who moves; `moving` acts
    registry    polls verifiers and drafters, attaches drafters, reports losses
    planner     pure: sampling parameters, stopping rules and the plan of a session
    output      ids to text, stop strings
    journal     what every running request has emitted so far
    metrics     Prometheus metrics
"""
