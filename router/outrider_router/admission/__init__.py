"""Admission of requests: access control, the queue, reserved K/V capacity, fairness between
tenants. It may import `base`.

access_control.py          Authenticates callers and enforces the limits of their API keys.
arrival_queue.py           New requests enter one at a time, so that a burst of them does not hold
                           the event loop.
capacity_ledger.py         K/V capacity reserved on each verifier.
length_estimate.py         Expected answer length from recent requests.
policy.py                  Pure admission policy: which request goes to which verifier.
queue.py                   AdmissionQueue: waiting and placed requests.
request_group.py           Requests that are admitted together or not at all.
wait_order.py              Order of waiting requests, and which one is displaced.
"""
