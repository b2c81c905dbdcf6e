#!/bin/bash
# serve.sh CHECKPOINT [FLAG ...]: starts vLLM's server of the environment that $PY belongs to, and returns when it answers on port
# 8100; serve.sh stop ends it. What `bench.gpu.compare --other` calls. The client asks for as many tokens as the answer is to have.
set -euo pipefail
state=${TMPDIR:-/tmp}/bench-vllm-cpu
if [ "$1" = stop ]; then
  [ ! -e "$state/pid" ] || kill -TERM -- "-$(cat "$state/pid")" 2>/dev/null || true
  rm -rf "$state"
  exit 0
fi
mkdir -p "$state"
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# Not `vllm serve`: it looks for its own version under the name of the package for GPUs.
setsid "$PY" -m vllm.entrypoints.openai.api_server --model "$@" --served-model-name glm --host 127.0.0.1 --port 8100 &
echo $! >"$state/pid"
for _ in $(seq 300); do
  ! curl -sf -o /dev/null http://127.0.0.1:8100/health || exit 0
  kill -0 "$(cat "$state/pid")"
  sleep 1
done
exit 1
