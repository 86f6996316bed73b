"""Admission of requests: access control, the queue, reserved K/V capacity, fairness between
tenants. It may import `base`.

access_control.py          Access control of the gRPC and HTTP APIs: authentication, and the limits
                           of each API key.
arrival_queue.py           Arrival queue: admits one request per event-loop turn, so that bursts do
                           not block the loop.
capacity_ledger.py         Capacity ledger: KV-cache tokens that one router has reserved on each
                           verifier.
length_estimate.py         Estimate of a request's output length from recent outputs.
policy.py                  Admission policy: selects the waiting requests to admit, and a verifier
                           for each.
queue.py                   Admission queue of one router: its requests while they wait for a
                           verifier or run on one.
request_group.py           Request group: requests of one call that are admitted to the queue
                           together or not at all.
wait_order.py              Order of the waiting requests, and the choice of one to displace from a
                           full queue.
"""
