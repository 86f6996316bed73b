"""Parts that everything else uses: tenants, API keys, metrics, readiness, DNS names.

api_keys.py                API keys: the key file, and the caller that a credential identifies.
dns_names.py               DNS names among the peer addresses, and the addresses that they have
                           resolved to.
metrics.py                 Prometheus metrics of the router.
metrics_history.py         History of the router's metrics: samples of the last minutes, in memory.
readiness.py               Readiness of a router: whether it can serve requests, and the listeners
                           of changes.
reasons.py                 Label values of metrics: reasons of failovers, session moves and drafter
                           quarantines, and outcomes of forwarded streams.
retry_hints.py             Retry-after hints for refused clients, each for a separate queue
                           position.
slow_readers.py            Write timeout of response streams: disconnects clients that stop reading.
tenants.py                 Tenants: token-bucket limits, and fair queueing between tenants of one
                           priority.
"""
