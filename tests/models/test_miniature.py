"""A miniature has the settings of its config, and of its sizes what may change a computation."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from lightning_megatron_rl.models.verification.miniature import pattern, related, shrink
from lightning_megatron_rl.models.verification.signature import SIZE_KEYS
from scripts.model_proofs import RELEASED, config_files

TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id"}
KEPT = {"head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts", "max_position_embeddings"}
SMALLER = {*SIZE_KEYS, *TOKENS} - KEPT  # rotary frequencies follow from the widths of heads


def small(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    (directory / "config.json").write_text(json.dumps(raw))
    return shrink(raw, AutoConfig.from_pretrained(directory))


@pytest.mark.parametrize("name", RELEASED)
def test_everything_but_sizes_stays(name: str, tmp_path: Path):
    raw = config_files()[name] | {"a_key_of_nobody": 3, "hidden_dropout": 0.1}
    found = small(raw, tmp_path)
    assert {key for key in {**raw, **found} if raw.get(key) != found.get(key)} <= SMALLER
    heads, groups = (raw[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    assert found["num_attention_heads"] * groups == heads * found["num_key_value_heads"]
    assert found["hidden_size"] <= 2048
    assert found["num_hidden_layers"] <= 8
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert AutoConfig.from_pretrained(tmp_path).architectures == raw["architectures"]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("GPT-OSS", {"intermediate_size": 1440}, {"hidden_size": 64, "intermediate_size": 32}),
        ("GPT-OSS", {}, {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "sliding_window": 24}),
        ("Qwen3-30B-A3B", {}, {"num_experts": 10}),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 128}, {"num_experts": 128}),
        ("DeepSeek-V3", {}, {"n_routed_experts": 24, "first_k_dense_replace": 1, "num_hidden_layers": 3}),
        ("DeepSeek-V3", {"first_k_dense_replace": 0}, {"first_k_dense_replace": 0, "num_hidden_layers": 2}),
        ("DeepSeek-V3", {"first_k_dense_replace": 61}, {"first_k_dense_replace": 2, "num_hidden_layers": 2}),
        ("Gemma-3-1B", {}, {"num_hidden_layers": 7}),
        # 28 heads of 1000 / 28 = 35 numbers, and 20 numbers more
        ("Qwen2.5-7B", {"hidden_size": 1000}, {"num_attention_heads": 14, "hidden_size": 14 * 35 + 13}),
        ("Llama-2-7B", {"num_key_value_heads": 7}, {"num_key_value_heads": 7}),  # for the probe to fail on
    ],
)
def test_relations_of_sizes_stay(name: str, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path):
    found = small(config_files()[name] | changes, tmp_path)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen2.5-7B", {"hidden_size": 14 * 32}),
        ("Qwen2.5-7B with its heads' width", {"hidden_size": 14 * 32, "head_dim": 32}),
        ("Qwen3-30B-A3B", {"hidden_size": 64, "head_dim": 128}),  # its heads are wider than the model
        ("DeepSeek-V3", {"hidden_size": 64, "qk_nope_head_dim": 128}),
    ],
)
def test_heads_that_make_the_models_width_can_be_narrowed(name: str, expected: dict[str, Any], tmp_path: Path):
    name, _, own = name.partition(" with ")
    (tmp_path / "config.json").write_text(json.dumps(raw := config_files()[name] | ({"head_dim": 128} if own else {})))
    found = shrink(raw, AutoConfig.from_pretrained(tmp_path), most_head_dim=32)
    assert {key: found[key] for key in expected} == expected
    assert ("head_dim" in found) == ("head_dim" in raw)


def test_lists_of_layers_keep_their_pattern(tmp_path: Path):
    raw = config_files()["tiny qwen3"] | {"num_hidden_layers": 30, "kinds": ["a", "a", "b"] * 10}
    raw.pop("layer_types", None)
    found = small(raw, tmp_path)
    assert (found["num_hidden_layers"], found["kinds"]) == (4, ["a", "a", "b", "a"])
    found = small(raw | {"kinds": ["a"] * 29 + ["b"]}, tmp_path)  # no pattern: all layers
    assert (found["num_hidden_layers"], found["kinds"]) == (30, ["a"] * 29 + ["b"])


@pytest.mark.parametrize(("values", "expected"), [(["a"] * 9, ["a"]), (["a", "b", "a"], ["a", "b"]), ([1, 2], [1, 2])])
def test_pattern(values: list[Any], expected: list[Any]):
    assert pattern(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(4096, 64), (8192, 128), (2048, 32), (5000, 48), (40, 40), (128, 72), (32, 40)]
)
def test_related_sizes(value: int, expected: int):
    assert related(value, 72 if value == 128 else 48, [(4096, 64)]) == expected


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 0), ("num_attention_heads", -4), ("vocab_size", True)])
def test_sizes_that_are_none_are_refused(name: str, value: Any):
    raw = config_files()["tiny qwen3"]
    config = AutoConfig.for_model(**{key: item for key, item in raw.items() if key != "architectures"})
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=f"config.json has {name}={value!r}"):
        shrink(raw, config)
