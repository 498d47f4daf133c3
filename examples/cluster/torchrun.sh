#!/usr/bin/env bash
# The same run on every node: RENDEZVOUS is the first node's address and a free port there, NODES how many nodes there are.
#   RENDEZVOUS=node-0:29500 NODES=2 examples/cluster/torchrun.sh --config configs/demo/sft.yaml --config examples/cluster/two_nodes.yaml
set -euo pipefail
: "${RENDEZVOUS:?address and port of the first node}" "${NODES:?number of nodes}"
exec torchrun --nnodes "$NODES" --nproc-per-node "${DEVICES:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${JOB:-train}" --max-restarts "${RESTARTS:-0}" \
  --no-python lightning-megatron-rl fit "$@"
