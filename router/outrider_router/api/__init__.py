"""APIs for clients and operators: gRPC, OpenAI HTTP, status page, metrics. It may import all other
packages of the router.

fleet_metrics.py           Prometheus collector of the fleet: queue, verifiers and drafter links,
                           read at every scrape.
inference_grpc.py          InferenceService over gRPC: decodes requests for `RouterService` and
                           encodes its answers.
listeners.py               The router's gRPC and metrics ports, and the credentials that each of
                           them requires.
metrics_export.py          Registers the fleet's metrics, and their vLLM names, in the router's
                           Prometheus registry.
pool_grpc.py               PoolService over gRPC: adds drafters to a running router and removes
                           them.
server_status.py           Server info and model list, built from the state of the router and its
                           fleet.
stream_forwarding.py       Forwarding of resumed streams to the router of the fleet that has the
                           request.
vllm_metrics.py            Exports the router's metrics under vLLM's names (`--metrics-compat
                           vllm`).
"""
