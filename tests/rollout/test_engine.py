import logging
import subprocess
import sys

import pytest

from lightning_megatron_rl.rollout.protocol import (
    GenerationRequest,
    SamplingParams,
    check_requests,
    derive_seed,
    note_sleep,
)


def test_seeds_are_the_same_in_another_process_with_other_hashes():
    code = (
        "from lightning_megatron_rl.rollout.protocol import derive_seed;"
        "print(derive_seed(1, 2, 3, 'gsm8k'), hash('gsm8k'))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(other.stdout.split()[0]) == derive_seed(1, 2, 3, "gsm8k")


def test_seeds_have_31_bits_and_differ_in_every_argument():
    seeds = {derive_seed(b, s, p, d) for b in range(3) for s in range(200) for p in range(50) for d in ("train", "val")}
    # 60,000 draws from 2**31 values: 60,000² / 2**32 = 0.8 collisions expected, more than 6 in one of 10**5 such sets
    assert len(seeds) >= 60_000 - 6
    assert min(seeds) >= 0
    assert 2**30 < max(seeds) < 2**31
    # the fields are separated: (1, 23) is not (12, 3)
    assert derive_seed(0, 1, 23) != derive_seed(0, 12, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": 0.005}, "temperature=0.005"),
        ({"temperature": 2.5}, r"temperature=2\.5 must be in \[0, 2\].*vLLM refuses more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": ("a", "")}, "empty string"),
        ({"stop": "</a>"}, r"sampling\.stop='</a>' .* give a list, \['</a>'\]"),
        ({"stop": (1,)}, r"sampling\.stop=\(1,\) .* strings"),
    ],
)
def test_bad_sampling_params_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_stop_given_as_a_list_becomes_a_tuple():
    assert SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))


@pytest.mark.parametrize(
    ("request_", "temperature", "message"),
    [
        (GenerationRequest([], seed=0), 1.0, "request 1: the prompt is empty"),
        (GenerationRequest([3, 128], seed=0), 1.0, "request 1: token id 128 at position 1 .* 128"),
        (GenerationRequest([-1], seed=0), 1.0, "request 1: token id -1"),
        (GenerationRequest([3] * 41, seed=0), 1.0, r"\(41\) \+ max_tokens \(24\) = 65 > max_model_len \(64\)"),
        (GenerationRequest([3], seed=0, num_generations=0), 1.0, "request 1: num_generations=0"),
        (GenerationRequest([3], seed=0, num_generations=2), 0.0, "request 1: num_generations=2 at temperature=0"),
        (GenerationRequest([3], seed=-1), 1.0, "request 1: seed=-1"),
    ],
)
def test_bad_requests_are_refused_by_index_and_value(request_, temperature, message):
    params = SamplingParams(temperature=temperature, max_tokens=24)
    good = GenerationRequest([3] * 40, seed=0)
    check_requests([good], params, vocab_size=128, max_model_len=64)
    with pytest.raises(ValueError, match=message):
        check_requests([good, request_], params, vocab_size=128, max_model_len=64)


@pytest.mark.parametrize(("freed", "warns"), [(8.9e9, True), (9.1e9, False)])
def test_memory_that_did_not_come_free_is_warned_about(freed, warns, caplog):
    with caplog.at_level(logging.WARNING):
        note_sleep(2, int(freed), expected=int(10e9))
    assert ("freed 8.90 GB of the 10.00 GB that the engine had" in caplog.text) is warns
