"""The cost of a sequence against torch's own count of a Transformers forward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron_rl.models.flops import sequence_flops
from tests.tiny_models import VOCAB_SIZE


def megatron_config(path) -> tuple[float, float]:
    from lightning_megatron_rl.compat.bridge import import_auto_bridge
    from lightning_megatron_rl.models.families.registry import bridges

    provider = import_auto_bridge(bridges()).from_hf_pretrained(str(path)).to_megatron_provider(load_weights=False)
    return sequence_flops(provider, VOCAB_SIZE)


def test_flops_are_those_that_torch_counts(worker_pool, qwen3_dir):
    from transformers import AutoModelForCausalLM

    linear, quadratic = worker_pool.run(megatron_config, qwen3_dir, world_size=1)[0]
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32, attn_implementation="eager")
    for length in (16, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64))
        # eager attention computes the upper half of the scores too, which a causal kernel leaves out; the product of
        # rotary frequencies and positions is counted by torch and is no weight's
        counted = counter.get_total_flops()
        assert linear * length + 2 * quadratic * length**2 == pytest.approx(counted, rel=2e-3)
