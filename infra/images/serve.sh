#!/bin/sh
# Serves the checkpoint in $MODEL; more arguments go to vLLM. VLLM_API_KEY must be set. WEIGHT_TRANSFER is
# machine.servers.weight_transfer of the runs that join: file, delta or nccl.
set -eu
: "${MODEL:?set MODEL to the folder of a checkpoint}"
: "${VLLM_API_KEY:?set VLLM_API_KEY; the routes that load weights must not be open}"
if [ ! -f "$MODEL/config.json" ]; then
  echo "no checkpoint is in $MODEL: see "On Kubernetes" in docs/operations/platform.md" >&2
  exit 1
fi
case "${WEIGHT_TRANSFER:-file}" in
  file) ;;
  delta) set -- --worker-extension-cls armature_served.versions.Versions "$@" ;;
  *) set -- --weight-transfer-config "{\"backend\": \"$WEIGHT_TRANSFER\"}" "$@" ;;
esac
exec python3 -m vllm.entrypoints.openai.api_server \
  --model "$MODEL" --served-model-name policy --host 0.0.0.0 --port 8000 \
  --logprobs-mode processed_logprobs --generation-config vllm --seed 0 \
  --max-model-len "${MAX_MODEL_LEN:-4096}" \
  --limit-mm-per-prompt "{\"image\": ${MAX_IMAGES:-4}, \"video\": 0}" \
  --dtype "${DTYPE:-bfloat16}" --tensor-parallel-size "${GPUS:-1}" \
  --middleware armature_served.require_key.RequireKey --allowed-origins "[]" --disable-fastapi-docs "$@"
