"""Resumable requests: their output, which a client can resume reading, and the durable log by which
they survive a restart of the router. It may import the modules of `requests` that describe one
request, never those that serve it.

durable_log.py             Durable log of resumable requests: the file from which a restarted router
                           resumes them.
log_records.py             Record format of the durable log of resumable requests.
resumable_answers.py       Resumable answers: output that a client can resume reading after a broken
                           connection.
resumable_requests.py      Resumable requests of one router: their tasks, their answers, and the
                           durable log.
"""
