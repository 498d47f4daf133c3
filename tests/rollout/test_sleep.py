"""Sleep and wake: vLLM on CPU keeps its memory, but everything else happens as on a GPU."""

import pytest

from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
from tests.rollout.conftest import make_requests, max_logprob_error
from tests.rollout.test_vllm import TOLERANCE

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.mark.slow
def test_wakes_in_parts_and_samples_what_it_would_have(fault_harness):
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(41)
    before = engine.generate(requests, PARAMS)
    assert engine.sleep(1) == 0  # nothing is freed on CPU
    assert engine.sleep(1) == 0  # asleep already
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    engine.wake()
    assert engine.generate(requests, PARAMS) == before


@pytest.mark.slow
def test_update_wakes_the_weights_and_sampling_the_rest(fault_harness):
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(42)
    engine.generate(requests, PARAMS)
    engine.sleep(2)
    fault_harness.push_random_weights(43)
    assert engine._awake == {"weights"}
    results = engine.generate(requests, PARAMS)
    assert max_logprob_error(fault_harness.model, requests, results) <= TOLERANCE


@pytest.mark.slow
def test_weights_that_a_deep_sleep_dropped_come_from_the_host_again(fault_harness):
    """The shared memory still has them; without it, `generate` would ask for them."""
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(44)
    before = engine.generate(requests, PARAMS)
    engine.sleep(2)
    assert engine._worker_push is None
    assert engine.generate(requests, PARAMS) == before
    assert engine.weight_version == fault_harness.version


@pytest.mark.slow
def test_restarted_process_is_awake(fault_harness):
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(45)
    before = engine.generate(requests, PARAMS)
    engine.sleep(1)
    engine._worker.kill()
    assert engine.generate(requests, PARAMS) == before


@pytest.mark.slow
def test_refusals(harness, fault_harness):
    with pytest.raises(ValueError, match="sleep_level=0 cannot sleep"):
        harness.engine.sleep(1)
    with pytest.raises(ValueError, match=r"sleep\(level=3\)"):
        fault_harness.engine.sleep(3)
    with pytest.raises(ValueError, match=r"wake\(tags=\['cache'\]\)"):
        fault_harness.engine.wake(["cache"])
    for values, message in (
        ({"sleep_level": 3}, r"sleep_level=3 must be in \[0, 2\]"),
        ({"bucket_mb": 0}, "bucket_mb=0"),
    ):
        with pytest.raises(ValueError, match=message):
            VLLMEngine(**values)
