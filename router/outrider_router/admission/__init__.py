"""Admission of requests: access control, the queue, reserved KV capacity, fairness between
tenants. It may import `base`.

access_control.py          Access control of the gRPC and HTTP APIs: authentication, and the limits
                           of each API key.
capacity_ledger.py         Capacity ledger: KV-cache tokens that one router has reserved on each
                           verifier.
policy.py                  Admission policy: selects the waiting requests to admit, and a verifier
                           for each.
queue.py                   Queues of one router: one in which requests arrive, and one in which they
                           wait for a verifier.
request_group.py           Request group: requests of one call that are admitted to the queue
                           together or not at all.
"""
