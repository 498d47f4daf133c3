"""Models for the tests of this room."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def qwen3_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Qwen3-MoE (fp32, four experts, two per token) and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture(scope="session")
def deepseek_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random DeepSeek-V3 (fp32): two dense layers, then two with experts, whose routers have an expert bias."""
    return save_tiny_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3_plain")
