# Training and sampling on NVIDIA GPUs: the pinned packages in an environment of their own, on an image of NVIDIA's (NGC).
#   docker build -f docker/gpu.Dockerfile -t lightning-megatron-rl:gpu .
#   docker run --rm --gpus all --ipc=host lightning-megatron-rl:gpu doctor --device cuda
# torch of the image is left alone: torch, vLLM and Transformer Engine must be built for each other (docs/install.md).
ARG BASE=nvcr.io/nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git libnuma1 make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv
ENV PATH=/opt/venv/bin:${PATH}
RUN python3.12 -m venv /opt/venv
WORKDIR /opt/lightning-megatron-rl
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r requirements/gpu.txt
# Transformer Engine's PyTorch extension has no wheel: some 14 minutes of CPU time, less with more jobs
ARG MAX_JOBS=4
RUN nvidia=/opt/venv/lib/python3.12/site-packages/nvidia \
    && export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 \
    && export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include \
    && pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r requirements/gpu-source.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /workspace
ENTRYPOINT ["lightning-megatron-rl"]
CMD ["doctor", "--device", "cuda"]
