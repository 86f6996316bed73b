#!/usr/bin/env bash
# The cells of benchmarks/results/gpu/service.json, in parts, each for one machine:
#
#   benchmarks/record.sh separate OUT DIR    two GPUs: a drafter on a card of its own, at an 8B's cost
#   benchmarks/record.sh idle OUT DIR        two GPUs: the exchange of processes that let cores sleep
#   benchmarks/record.sh fused OUT DIR       one GPU: a head in the verifier, every parameter
#   benchmarks/record.sh small OUT [LOADS]   one GPU: the 135M model with a drafter that loses there
#   benchmarks/record.sh simulated OUT       one GPU: 256 sessions, acceptance by chance
#   benchmarks/record.sh host OUT            router and host; no GPU
#
# OUT is a folder for the parts, DIR has target/ and head/ (benchmarks/widen.py). Then
#   outrider bench serve --out benchmarks/results/gpu/service.json --merge OUT/*.json
set -u
part=$1 out=$2 dir=${3:-}
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
    grep -q "ready on $address" "$out/$name.log" && return
    kill -0 "$services" 2>/dev/null || break
    sleep .5
  done
  tail -20 "$out/$name.log" >&2
  exit 1
}

down() {
  kill -TERM "$services"
  wait "$services"
}

cells() {
  $OUTRIDER bench serve --router "$address" --out "$out/$part.json" --keep-plain "$@"
}

gaps() {
  $OUTRIDER bench timeline "$out/$1/verifier-0.json" "$out/$1/drafter-0.json" --gaps "${@:2}"
}

case $part in
separate)
  wide=(--placement separate --model "$dir/target" --head "$dir/head" --max-sessions 64 --routers 2)
  up separate 7101 "${wide[@]}" --awake-cores 3 --trace-dir "$out/awake"
  of=(--placement separate --routers 2 --model "$dir/target" --awake-cores 3)
  cells "${of[@]}" --drafts chain-4,tree-16 --sampling greedy,top_p --sessions 1,8,32,64 --waves 2
  cells "${of[@]}" --drafts chain-4+lockstep --sampling greedy --sessions 64,32,8,1 --waves 2
  down
  gaps awake --gaps-out "$out/exchange.json"
  ;;
idle)
  up idle 7102 --placement separate --model "$dir/target" --head "$dir/head" --max-sessions 64 \
    --awake-cores 0 --trace-dir "$out/idle"
  cells --placement separate --model "$dir/target" --drafts chain-4+lockstep --sampling greedy \
    --sessions 1 --waves 1 --max-tokens 128
  down
  gaps idle --idle-cores --gaps-out "$out/exchange-idle.json"
  ;;
fused)
  of=(--placement fused --model "$dir/target")
  wide=(--placement fused --model "$dir/target" --head "$dir/head" --max-sessions 64)
  up chain 7111 "${wide[@]}" --draft-length 4 --draft-topk 1
  cells "${of[@]}" --drafts chain-4 --sampling greedy,top_p --sessions 1,8,32,64 --waves 3
  cells "${of[@]}" --drafts chain-4 --sampling penalties,bias,rejection --sessions 1,8,32 --waves 1
  down
  up tree 7112 "${wide[@]}" --draft-length 16 --draft-topk 4
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
  up simulated 7131 --placement fused --simulated-acceptance 2.6 --draft-length 3 --draft-topk 1 \
    --routers 4 --max-sessions 256 --kv-tokens 262144
  nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 100 >"$out/busy.log" &
  looks=$!
  cells --placement fused --routers 4 --clients 8 --max-tokens 512 --drafts chain-3 \
    --sessions 256 --requests 2048 --waves 3
  kill "$looks"
  down
  # Of the time in which there is work at all.
  awk '$1 > 20 { sum += $1; n++ } END { print "busy", sum / n / 100, "of", n, "samples" }' "$out/busy.log"
  ;;
host)
  $OUTRIDER bench events --clients 8 --tokens 1 --seconds 4 --out "$out/events.json.txt"
  $OUTRIDER bench host --sessions 1,64
  $OUTRIDER bench host --sessions 1 --pause-ms 4
  ;;
*)
  echo "no part $part: separate, idle, fused, small, simulated, host" >&2
  exit 2
  ;;
esac
