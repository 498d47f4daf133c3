# Training and sampling without a GPU: the pinned packages, checked against their hashes.
#   docker build -f docker/cpu.Dockerfile -t lightning-megatron-rl:cpu .
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/lightning-megatron-rl
# the packages first: a change of the code does not install them again
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r requirements/cpu.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /workspace
ENTRYPOINT ["lightning-megatron-rl"]
CMD ["doctor", "--device", "cpu"]
