"""What clients and operators call: gRPC, OpenAI HTTP, status page, metrics. It may import
everything.

fleet_metrics.py           Prometheus metrics of the fleet.
inference_grpc.py          InferenceService over gRPC.
listeners.py               Opens the router's gRPC and metrics ports.
metrics_export.py          Registers the fleet and vLLM metrics.
pool_grpc.py               PoolService over gRPC: add and remove drafters.
server_status.py           Server info and model list.
vllm_metrics.py            The router's metrics under vLLM's names.
"""
