"""`engine.vllm_args`: what the installed vLLM has passes, what the engine owns does not, and vLLM is not imported."""

import sys
from typing import Any

import pytest

from lightning_megatron_rl.rollout import VLLMEngine
from lightning_megatron_rl.rollout.vllm.arguments import REFUSED, check_vllm_args, engine_arguments
from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine
from lightning_megatron_rl.rollout.vllm.settings import llm_arguments

pytestmark = pytest.mark.skipif(engine_arguments() is None, reason="vLLM is not installed")


def arguments(device: str = "cpu", **others: Any) -> dict[str, Any]:
    engine = VLLMEngine(max_model_len=512, max_num_seqs=8, kv_cache_memory_gb=0.5, vllm_args=others)
    return llm_arguments(engine, "model", device, stored_dtype="float32", eager=True)


def test_the_model_is_read_as_transformers_reads_it():
    """Of a release that has Mistral's own format, too; test_families_sampled.py has a real engine."""
    formats = ("config_format", "load_format", "tokenizer_mode")
    assert {arguments(device)[name] for device in ("cpu", "cuda") for name in formats} == {"hf"}


def test_gpt_oss_is_sampled_in_bfloat16_on_a_cpu():
    """What vLLM says of another dtype is an error of a kernel, after the model has been loaded."""

    def start(dtype: Any, stored: str, device: str = "cpu") -> None:
        options: dict[str, Any] = {"eager": True, "architectures": ("GptOssForCausalLM",)}
        llm_arguments(VLLMEngine(dtype=dtype), "model", device, stored_dtype=stored, **options)

    with pytest.raises(ValueError, match=r"engine.dtype='auto' is float32 for GptOssForCausalLM, .* to bfloat16"):
        start("auto", "float32")
    with pytest.raises(ValueError, match=r"engine.dtype='float16' is float16"):
        start("float16", "bfloat16")
    start("auto", "bfloat16")
    start("bfloat16", "float32")
    start("float32", "float32", device="cuda")


@pytest.mark.parametrize("engine", [VLLMEngine, ColocatedVLLMEngine])
def test_arguments_of_vllms_own_pass(engine):
    own = {"max_num_batched_tokens": 4096, "enable_prefix_caching": False, "block_size": None, "attention_backend": "X"}
    assert engine(vllm_args=own).vllm_args == own
    assert engine().vllm_args == {}
    passed = arguments(**own)
    assert passed["max_num_batched_tokens"] == 4096
    assert passed["enable_prefix_caching"] is False
    assert passed["max_model_len"] == 512


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_batchd_tokens": 9}, "no argument max_num_batchd_tokens; did you mean max_num_batched_tokens?"),
        ({"qqqq": 9}, r"no argument qqqq; vllm\.EngineArgs has the names"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens='many' is a str; vLLM's .* is int or null"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is a int; vLLM's .* is bool or null"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True is a bool"),
        ({"max_model_len": 9}, "max_model_len is not passed through: set the engine's max_model_len"),
        ({"model": "x"}, "model is not passed through: the sampler loads what is trained"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is not passed through: the trainer would score another"),
        ({"quantization_config": {}}, "quantization_config is not passed through: the sampler would quantise"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is not passed through: with keys and values of fewer bits"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales is not passed through: with keys and values"),
        ({"cpu_offload_gb": 4.0}, "cpu_offload_gb is not passed through: weights that vLLM keeps on the host"),
        ({"offload_group_size": 2}, "offload_group_size is not passed through: weights that vLLM keeps on the host"),
        ({"model_impl": "transformers"}, "model_impl is not passed through: updates and log-probs were tested"),
        ({"enable_lora": True}, "enable_lora is not passed through: adapters are merged"),
        ({"data_parallel_rank": 1}, "data_parallel_rank is not passed through: the engine starts and places"),
        ({"kv_offloading_size": 4.0}, "kv_offloading_size is not passed through: keys and values on the host would"),
        ({"_api_process_rank": 1}, "_api_process_rank is not passed through"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"engine.vllm_args: .*{message}"):
        VLLMEngine(vllm_args=given)


def test_everything_that_the_engine_sets_is_refused():
    known = engine_arguments()
    assert known is not None
    for device in ("cpu", "cuda"):
        for name in arguments(device).keys() - {"enable_prefix_caching", "max_num_batched_tokens"}:
            if name == "enable_chunked_prefill":  # refused on a CPU alone
                with pytest.raises(ValueError, match="generators on a CPU cannot"):
                    arguments(enable_chunked_prefill=True)
                continue
            with pytest.raises(ValueError, match=f"{name} is not passed through"):
                check_vllm_args({name: None})
    plain = [name for name in REFUSED if "*" not in name]
    assert [name for name in plain if name not in known] == []  # vLLM has renamed one: the list must follow


def test_a_prompt_must_fit_into_one_step_on_a_cpu():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=64 on a CPU must be at least max_model_len \(512\)"):
        arguments(max_num_batched_tokens=64)
    assert arguments("cuda", max_num_batched_tokens=64)["max_num_batched_tokens"] == 64


def test_vllm_is_read_and_not_imported():
    engine_arguments.cache_clear()
    assert engine_arguments()
    assert "vllm" not in sys.modules or "vllm.engine.arg_utils" not in sys.modules
