"""What is computed in which format on a GPU: each row of the table in docs/precision.md has its test here."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.strategy.products import TF32_OVERRIDE, check_products, product_error
from tests.gpu.engines import fit_grpo
from tests.tiny_models import save_tiny_model
from tests.training import fit_sft

pytestmark = pytest.mark.deadline(400)
ONE = {"world_size": 1, "init_process_group": False, "timeout": 300}
FP32 = 1e-5  # of a log-prob: 7e-6 was seen between Transformers on a CPU and torch's layers on a GPU, 5e-7 with vLLM
FAMILIES = {"dense": "qwen3", "experts": "qwen3_moe", "latent": "deepseek_v3_plain"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny_model(tmp_path_factory.mktemp(name), family) for name, family in FAMILIES.items()}


class Looks(pl.Callback):
    """Multiplies as the run does, and looks at torch's switches, while it trains."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        device = trainer.strategy.root_device
        self.found = {
            name: product_error(device, transformer_engine=engine)
            for name, engine in (("torch", False), ("transformer_engine", True))
        }
        self.found["reduced_sums"] = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        generator = torch.Generator(device).manual_seed(0)
        # few results of long sums: cuBLAS splits the sum
        left, right = (torch.randn(32, 65_536, generator=generator, device=device).bfloat16() for _ in range(2))
        exact = left.double() @ right.double().t()
        product = torch.mm(left, right.t(), out_dtype=torch.float32)
        self.found["sum_of_bf16"] = float((product.double() - exact).norm() / exact.norm())


def export(model: Path, world_size: int, directory: Path, trainer: dict[str, Any], **module: Any) -> dict[str, Any]:
    """Two steps of SFT, and what the export's proof found."""
    from lightning_megatron_rl.callbacks.hf_export import HFExport

    looks, exported = Looks(), HFExport(str(directory))
    run = fit_sft(
        model, {}, world_size, callbacks=[looks, exported], module=module, trainer={"accelerator": "cuda", **trainer}
    )
    card = (directory / "last" / "README.md").read_text() if (directory / "last").exists() else ""
    return {**looks.found, "failures": exported.failures, "card": card, "steps": run.steps}


def difference(card: str) -> float:
    """The largest difference of a log-prob that the export's card states."""
    return float(card.split("log-probs differ by at most ")[1].split()[0].rstrip(".;,)"))


def export_in_fp32(models: dict[str, Path], directory: Path) -> dict[str, dict[str, Any]]:
    """All families with both kinds of layers, in a process to which nobody has said anything of TF32."""
    del os.environ[TF32_OVERRIDE]  # the pool's
    return {
        f"{family}, {layers}": export(model, 1, directory / family / layers, {}, layer_backend=layers)
        for family, model in models.items()
        for layers in ("torch", "transformer_engine")
        if family != "latent" or layers == "torch"
    }


@pytest.mark.smoke
def test_fp32_is_fp32(fresh_pool, models, tmp_path):
    """Projections, attention, routers, experts, output layer: log-probs are those of Transformers on a CPU."""
    for name, found in fresh_pool.run(export_in_fp32, models, tmp_path, **ONE)[0].items():
        assert found["failures"] == [], name
        assert found["torch"] < 1e-6, name
        assert found["transformer_engine"] < 1e-6, name
        assert difference(found["card"]) < FP32, name


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_sums_of_bf16_products_are_in_fp32(gpu_pool, models, tmp_path, precision):
    found = gpu_pool.run(export, models["dense"], 1, tmp_path / "hf", {"precision": precision}, **ONE)[0]
    assert found["failures"] == []
    assert found["reduced_sums"] is False
    assert found["sum_of_bf16"] < 1e-5  # partial sums that are rounded to bf16 are off by 1e-3


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_sampler_in_fp32_is_fp32(gpu_pool, models, family):
    """Attention and experts of vLLM are Triton's kernels, whose default for fp32 is TF32."""
    run = gpu_pool.run(fit_grpo, models[family], 1, engine={"dtype": "float32"}, precision="32-true", steps=2, **ONE)[0]
    for step in run.steps:
        assert step["mismatch/abs_logp_diff"] < FP32
        assert abs(step["mismatch/is_max"] - 1) < FP32  # the worst token, exp(difference)


def test_colocated_sampler_in_fp32_is_fp32(fresh_pool, models):
    options: dict[str, Any] = {"kind": "colocated", "engine": {"dtype": "float32"}, "precision": "32-true", "steps": 2}
    run = fresh_pool.run(fit_grpo, models["dense"], 1, **options, **ONE)[0]
    assert all(abs(step["mismatch/is_max"] - 1) < FP32 for step in run.steps)


def ask_for_tf32(model: Path, directory: Path) -> dict[str, Any]:
    del os.environ[TF32_OVERRIDE]  # workers of the pool have it
    torch.set_float32_matmul_precision("high")
    return export(model, 1, directory, {})


def test_tf32_that_is_asked_for_is_computed_and_proofs_follow(fresh_pool, models, tmp_path):
    found = fresh_pool.run(ask_for_tf32, models["dense"], tmp_path / "hf", **{**ONE, "world_size": 1})[0]
    assert found["torch"] > 1e-5
    assert found["failures"] == []


def multiply_before(model: Path, world_size: int) -> str:
    """A process that has multiplied before the run: cuBLAS has read its variables."""
    del os.environ[TF32_OVERRIDE]
    device = torch.device("cuda", 0)
    product_error(device, transformer_engine=True)
    os.environ[TF32_OVERRIDE] = "0"
    with pytest.raises(RuntimeError) as refused:
        check_products(device, transformer_engine=True)
    check_products(device, transformer_engine=False)  # torch's own are fp32 by its switch
    return str(refused.value)


def test_products_that_are_tf32_all_the_same_are_refused(fresh_pool, models):
    words = fresh_pool.run(multiply_before, models["dense"], 1, **ONE)[0]
    assert "NVIDIA_TF32_OVERRIDE=0 in the environment before Python starts" in words
