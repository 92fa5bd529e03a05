#!/usr/bin/env bash
# Two replicas behind vllm-router on one host: deploy/routers/two-replicas.sh [MODEL [more flags of serve]]
# `pip install vllm-router` first. Clients use PORT (8000), the replicas have the two ports after it, and the router's own
# metrics the third. POLICY: cache_aware sends prompts with a common beginning to the same replica; round_robin takes turns.
set -euo pipefail

model=${1:-smollm2-135m}
[ $# -eq 0 ] || shift
port=${PORT:-8000}
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

workers=()
for number in 1 2; do
  "${TIGHTWIRE:-tightwire}" serve "$model" --port $((port + number)) --metrics-alias vllm "$@" &
  workers+=("http://127.0.0.1:$((port + number))")
done
"${ROUTER:-vllm-router}" --policy "${POLICY:-cache_aware}" --host 127.0.0.1 --port "$port" \
  --prometheus-port $((port + 3)) --worker-startup-check-interval 1 --worker-urls "${workers[@]}" &

wait -n # the first that ends, ends all
