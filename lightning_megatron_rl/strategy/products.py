"""Precision of matrix products on CUDA: fp32 unless TF32 was asked for; sums in fp32 for 16 bits."""

import os

import torch

# Read by cuBLAS when a process first uses it; over torch's switch and over Transformer Engine, which multiplies fp32
# matrices as TF32 whatever torch's switch says.
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
TORCH_TF32_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # torch's own switch, set from outside
ASK = "torch.set_float32_matmul_precision('high')"
# Relative error of a product of 512 terms against fp64: about 2e-7 in fp32, 3e-4 in TF32 (10 bits of mantissa).
_FP32_ERROR = 1e-5


def asks_for_tf32() -> bool:
    """Return whether torch's switch asks for TF32 in products of fp32 matrices, by its older or its newer interface."""
    own = torch.backends.cuda.matmul.fp32_precision
    return (torch.backends.fp32_precision if own == "none" else own) == "tf32"  # type: ignore[attr-defined]


def choose_products(precision: str, device: torch.device) -> None:
    """Set up products on CUDA for `precision`; call it before the process's first product there.

    Under ``"32-true"`` cuBLAS is told not to use TF32, unless torch's switch asks for it. In 16-bit precisions torch's
    products keep partial sums in fp32.

    Raises:
        ValueError: The environment asks for TF32 in a run in fp32, or forbids what torch's switch asks for.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if precision != "32-true":
        return
    override, asked = os.environ.get(TF32_OVERRIDE), asks_for_tf32()
    if os.environ.get(TORCH_TF32_OVERRIDE, "0") not in ("", "0"):
        raise ValueError(
            f"{TORCH_TF32_OVERRIDE}={os.environ[TORCH_TF32_OVERRIDE]} asks for TF32 (10 bits of mantissa), and"
            f" precision='32-true' for fp32 (23 bits): unset it. If TF32 is what you want, call {ASK} in your script."
        )
    if override not in (None, "", "0") and not asked:
        raise ValueError(
            f"{TF32_OVERRIDE}={override} makes every fp32 product TF32 (10 bits of mantissa), and precision='32-true'"
            f" asks for fp32 (23 bits): unset it. If TF32 is what you want, call {ASK} in your script."
        )
    if override == "0" and asked:
        raise ValueError(
            f"torch.set_float32_matmul_precision asks for TF32, and {TF32_OVERRIDE}=0 forbids it: unset"
            f" {TF32_OVERRIDE} for TF32, or leave the call out for fp32."
        )
    if not asked:
        os.environ[TF32_OVERRIDE] = "0"


def check_products(device: torch.device, *, transformer_engine: bool) -> None:
    """Multiply two matrices in fp32 as the model's layers will, and refuse a run in fp32 whose products are not.

    Raises:
        RuntimeError: They are TF32 without being asked for: the process had used cuBLAS before the run began.
    """
    if device.type != "cuda" or asks_for_tf32():
        return
    error = product_error(device, transformer_engine=transformer_engine)
    if error > _FP32_ERROR:
        raise RuntimeError(
            f"precision='32-true', but a product of fp32 matrices is off by {error:.1e} (fp32: 2e-7, TF32: 3e-4): this"
            f" process multiplied on the GPU before the run began, and cuBLAS read {TF32_OVERRIDE} then. Set"
            f" {TF32_OVERRIDE}=0 in the environment before Python starts, set train.layer_backend='torch', or ask for"
            f" TF32 by {ASK}."
        )


def product_error(device: torch.device, *, transformer_engine: bool) -> float:
    """Return the relative error of a product of fp32 matrices against fp64; random-number states stay as they are."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = torch.randn(256, 512, generator=generator, device=device)
    weight = torch.randn(384, 512, generator=generator, device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[device]):
        if transformer_engine:
            import transformer_engine.pytorch as te

            layer = te.Linear(512, 384, bias=False, params_dtype=torch.float32, device=device)
            layer.weight.copy_(weight)
            product = layer(inputs)
        else:
            product = inputs @ weight.t()
        exact = inputs.double() @ weight.double().t()
        return float((product.double() - exact).norm() / exact.norm())
