# The project: command, flows, worker, trainer, Prefect server and MLflow. Built from the repository's root:
#   docker build -f infra/images/armature.Dockerfile -t armature .
#   docker build -f infra/images/armature.Dockerfile -t armature:cuda --build-arg TORCH_BACKEND=cu130 .
# torch's CUDA wheels bring their own CUDA libraries, so both builds share one base image.
FROM python:3.11-slim-bookworm

ARG TORCH_BACKEND=cpu
# "true" adds vLLM's CPU build, so that train-vlm/colors runs in this image alone.
ARG WITH_VLLM=false

RUN apt-get update \
 && apt-get install -y --no-install-recommends git libnuma1 make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 armature \
 && pip install --no-cache-dir uv

WORKDIR /opt/armature
COPY --chown=armature:armature . .
RUN chown armature:armature . && mkdir -p .armature && chown armature:armature .armature
USER armature

RUN TORCH_BACKEND=$TORCH_BACKEND python -m armature.setup project \
 && uv pip install --no-cache --python .venv/bin/python \
      --constraint requirements/constraints.txt --requirement requirements/cluster.txt \
 && if [ "$WITH_VLLM" = true ]; then TORCH_BACKEND=cpu python -m armature.setup vllm; fi \
 && uv cache clean

ENV PATH=/opt/armature/.venv/bin:$PATH \
    ARMATURE_HOME=/opt/armature \
    DO_NOT_TRACK=1 \
    PYTHONUNBUFFERED=1
CMD ["armature", "list"]
