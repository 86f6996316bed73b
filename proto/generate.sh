#!/bin/sh
# Generates the Python code of the contract into a directory (default: the repository root).
# PYTHON must have grpcio-tools 1.76.0: newer generators demand newer runtimes at import.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-"$here/.."}
cd "$here"
"${PYTHON:-python3}" -m grpc_tools.protoc -I. \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  outrider/wire/v1/common.proto outrider/wire/v1/inference.proto \
  outrider/wire/v1/control.proto outrider/wire/v1/exchange.proto \
  outrider/wire/v1/pool.proto
