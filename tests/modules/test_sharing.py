"""What layouts and layers ask of micro-batches."""

import pytest

from lightning_megatron_rl.modules.sharing import FP8_TOKENS, microbatch_rules
from lightning_megatron_rl.parallel.layout import ParallelLayout


@pytest.mark.parametrize(("tp", "cp", "plain"), [(1, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 8)])
def test_fp8_has_a_multiple_of_16_tokens_on_every_rank(tp, cp, plain):
    layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=tp > 1)
    assert microbatch_rules(layout).row_multiple == plain
    multiple = microbatch_rules(layout, fp8=True).row_multiple
    assert multiple % plain == 0
    assert multiple // (tp * cp) % FP8_TOKENS == 0
