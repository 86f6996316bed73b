"""Parts that everything else uses: tenants, API keys, metrics, DNS names.

api_keys.py                API keys and the callers that they identify.
dns_names.py               DNS names that stand for several peers.
histogram.py               Prometheus histogram with batched updates.
metrics.py                 Prometheus metrics of the router.
reasons.py                 Reasons for which sessions move and drafters are quarantined: label
                           values of metrics.
retry_hints.py             Retry-after hints for refused clients.
slow_readers.py            Ends streams whose clients stop reading.
tenants.py                 Tenants: limits, token buckets and fair queueing.
"""
