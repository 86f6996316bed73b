#!/usr/bin/env bash
# The cells of benchmarks/results/gpu/service.json, in parts, each for one machine:
#
#   benchmarks/record.sh separate OUT DIR    two GPUs: a drafter on a card of its own, at an 8B's cost
#   benchmarks/record.sh exchange OUT DIR    two GPUs: what rounds in lock-step wait for
#   benchmarks/record.sh fused OUT DIR       one GPU: a head in the verifier, every parameter
#   benchmarks/record.sh small OUT [LOADS]   one GPU: the 135M model with a drafter that loses there
#   benchmarks/record.sh simulated OUT       one GPU: 256 sessions, acceptance by chance
#   benchmarks/record.sh host OUT            router and host; no GPU
#
# OUT is a folder for the parts, DIR has target/ and head/ (benchmarks/widen.py). Then
#   outrider bench serve --out benchmarks/results/gpu/service.json --merge OUT/*.json
set -eu
if [ $# -lt 2 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
part=$1 out=$2 dir=${3:-}
services=''
trap '[ -z "$services" ] || kill $services 2>/dev/null || true' EXIT
loads=${3:-1:48:4 8:128:8 32:512:8 64:768:8} # sessions, requests, waves
OUTRIDER=${OUTRIDER:-outrider}
mkdir -p "$out"

# up NAME PORT FLAGS...: services on PORT, ready, their output in OUT/NAME.log
up() {
  local name=$1 port=$2
  shift 2
  $OUTRIDER serve --device cuda --port "$port" "$@" >"$out/$name.log" 2>&1 &
  services=$! address=127.0.0.1:$port
  for _ in $(seq 600); do
    if grep -q "ready on $address" "$out/$name.log"; then return; fi
    if ! kill -0 "$services" 2>/dev/null; then break; fi
    sleep .5
  done
  tail -20 "$out/$name.log" >&2
  exit 1
}

down() {
  kill -TERM "$services"
  wait "$services" || true
  services=''
}

cells() {
  $OUTRIDER bench serve --router "$address" --out "$out/$part.json" --keep-plain "$@"
}

case $part in
separate)
  up separate 7101 --placement separate --model "$dir/target" --head "$dir/head" \
    --max-sessions 64 --routers 2 --busy-polling-cores 3
  of=(--placement separate --routers 2 --model "$dir/target" --busy-polling-cores 3)
  cells "${of[@]}" --drafts chain-4,tree-7x4,tree-16 --sampling greedy,top_p --sessions 1,8,32,64 --waves 2
  down
  ;;
exchange)
  # What a timeline has are its last rounds: these services do nothing but lock-step.
  for cores in 3 0; do
    up "exchange-$cores" "710$((2 + cores))" --placement separate --model "$dir/target" \
      --head "$dir/head" --max-sessions 64 --busy-polling-cores "$cores" --planner fixed \
      --trace-dir "$out/$cores"
    cells --placement separate --model "$dir/target" --busy-polling-cores "$cores" --planner fixed \
      --drafts chain-4+lockstep --sampling greedy --sessions 64,1 --waves 1 --max-tokens 128
    down
    idle=$([ "$cores" -gt 0 ] || echo --idle-cores)
    $OUTRIDER bench timeline "$out/$cores/verifier-0.json" "$out/$cores/drafter-0.json" \
      --gaps --gaps-out "$out/exchange-$cores.json" $idle
  done
  ;;
fused)
  of=(--placement fused --model "$dir/target")
  wide=(--placement fused --model "$dir/target" --head "$dir/head" --max-sessions 64)
  up chain 7111 "${wide[@]}" --draft-length 4 --draft-top-k 1
  cells "${of[@]}" --drafts chain-4 --sampling greedy,top_p --sessions 1,8,32,64 --waves 3
  cells "${of[@]}" --drafts chain-4 --sampling penalties,bias,rejection --sessions 1,8,32 --waves 1
  down
  up tree 7112 "${wide[@]}" --draft-length 16 --draft-top-k 4
  cells "${of[@]}" --drafts tree-16x4 --sampling greedy,top_p --sessions 1,8,32 --waves 2
  down
  ;;
small)
  up small 7121 --placement separate --max-sessions 64 --routers 4 --kv-tokens 65536
  for load in $loads; do
    IFS=: read -r sessions requests waves <<<"$load"
    cells --placement separate --routers 4 --in-turn --drafts chain-3 --max-tokens 128 \
      --temperature 0,.7,1,1.5,2 --sessions "$sessions" --requests "$requests" --waves "$waves"
  done
  down
  ;;
simulated)
  up simulated 7131 --placement fused --simulated-acceptance 2.6 --draft-length 3 --draft-top-k 1 \
    --routers 4 --max-sessions 256 --kv-tokens 262144
  nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 100 >"$out/busy.log" &
  looks=$!
  cells --placement fused --routers 4 --clients 8 --max-tokens 512 --drafts chain-3 \
    --sessions 256 --requests 2048 --waves 3
  kill "$looks"
  down
  # Of the time in which there is work at all.
  awk '$1 > 20 { sum += $1; n++ } END { print "busy", n ? sum / n / 100 : 0, "of", n, "samples" }' "$out/busy.log"
  ;;
host)
  $OUTRIDER bench events --clients 8 --tokens 1 --seconds 4 --out "$out/events.json.txt"
  $OUTRIDER bench host --sessions 1,64
  $OUTRIDER bench host --sessions 1 --pause-ms 4
  ;;
*)
  echo "no part $part: separate, exchange, fused, small, simulated, host" >&2
  exit 2
  ;;
esac
