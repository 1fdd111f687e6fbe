# A vLLM server that a pool can join. Of ours it has a plug-in, for Molmo2, and the middleware that asks for the key
# on every route.
#   docker build -f infra/images/vllm.Dockerfile -t armature-vllm .
FROM vllm/vllm-openai:v0.32.0

# vLLM 0.32 declares transformers < 5.20 but serves with it; trainer and server must process images alike.
RUN pip install --no-cache-dir "transformers==5.23.0"

COPY components/inference/served /opt/served
RUN pip install --no-cache-dir --no-deps /opt/served
COPY infra/images/serve.sh /opt/serve.sh
ENV VLLM_SERVER_DEV_MODE=1 \
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE=600 \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    HF_HUB_OFFLINE=1
EXPOSE 8000
ENTRYPOINT ["/bin/sh", "/opt/serve.sh"]
