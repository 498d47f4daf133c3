"""Checks that refuse a run on this machine: pure functions of the measured facts, one for each reason."""

import re
from contextlib import suppress

from lightning_megatron_rl.devices.facts import PROCESSORS, DeviceFacts, version_text

# the oldest driver that runs programs built with a CUDA of this major version (NVIDIA, CUDA compatibility)
OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
BF16_CAPABILITY = (8, 0)  # Ampere; below that bf16 is emulated, and neither Transformer Engine nor vLLM run it
ENGINE_CAPABILITY = (8, 0)  # Transformer Engine is made for Ampere and newer (its support matrix)
# per-tensor scales since Ada, of blocks since Hopper, of 32 numbers since Blackwell (Transformer Engine's user guide)
FP8_CAPABILITIES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
FP4_CAPABILITY = (10, 0)
WHOLE = 100  # percent
GPU_SETUP = "GPU=1 make setup (docs/install.md)"
ON_CPU = "or run on the CPU with --trainer.accelerator cpu"


def check_driver(facts: DeviceFacts) -> None:
    """Refuse a driver that cannot run what torch was built with.

    Raises:
        RuntimeError: With both versions and what to install.
    """
    if facts.driver is None or facts.torch_cuda is None:
        return
    oldest = OLDEST_DRIVERS.get(facts.torch_cuda[0])
    if oldest is not None and facts.driver < oldest:
        raise RuntimeError(
            f"the NVIDIA driver {version_text(facts.driver)} is too old for torch {facts.torch}: CUDA"
            f" {version_text(facts.torch_cuda)} needs {version_text(oldest)} or newer. Install a newer driver,"
            f" {ON_CPU}."
        )


def check_cuda(facts: DeviceFacts) -> None:
    """Refuse a run on CUDA where torch sees no device, with the reason.

    Raises:
        RuntimeError: With what was found and what to do.
    """
    if facts.gpus:
        return
    check_driver(facts)
    found = f"torch {facts.torch} finds no CUDA device"
    if facts.torch_cuda is None:
        raise RuntimeError(f"{found}: it is built for the CPU. Install the packages for CUDA: {GPU_SETUP}, {ON_CPU}.")
    if facts.hidden is not None:
        raise RuntimeError(
            f"{found}: CUDA_VISIBLE_DEVICES={facts.hidden!r} hides what there may be. Unset it or name devices that"
            f" nvidia-smi lists, {ON_CPU}."
        )
    if facts.driver is None:
        raise RuntimeError(
            f"{found}: there is no NVIDIA driver. Install one (in a container: start it with --gpus all), {ON_CPU}."
        )
    raise RuntimeError(
        f"{found}, and the driver is {version_text(facts.driver)}. See what nvidia-smi says (in a container: start it"
        f" with --gpus all), {ON_CPU}."
    )


def missing_cuda(facts: DeviceFacts) -> str | None:
    """Return what `check_cuda` says, None where it says nothing."""
    try:
        check_cuda(facts)
    except RuntimeError as error:
        return str(error)
    return None


def check_auto(facts: DeviceFacts) -> None:
    """Refuse a silent fallback to the CPU because of an old driver; without a driver or visible GPUs it is intended.

    Raises:
        RuntimeError: What `check_driver` says.
    """
    # "", "-1", or words such as SLURM's "NoDevFiles" show none
    shows = facts.hidden is None or re.match(r"\s*(\+?\d|GPU-|MIG-)", facts.hidden)
    if not facts.gpus and shows:
        check_driver(facts)


def check_device_count(requested: int, available: int) -> None:
    """Refuse more processes on a node than it has GPUs.

    Raises:
        ValueError: With both numbers.
    """
    if requested > available:
        raise ValueError(
            f"{requested} processes on this node, on which torch sees {available} GPUs: each process takes one. Set"
            f" trainer.devices to at most {available}, show more GPUs with CUDA_VISIBLE_DEVICES, use more nodes, or"
            " lower the parallel sizes."
        )


def check_processors(percent: str | None) -> None:
    """Refuse a part of a GPU's processors, with which numbers were wrong.

    On an H200 with 75 percent each of five runs at 1.7B ended at its first or second step, with log-probs that were
    NaN, whether the sampler worked beside training or not; without a limit they were right (torch 2.11.0+cu130,
    Transformer Engine 2.20.2).

    Args:
        percent: Value of `facts.PROCESSORS`; None: it is not set.

    Raises:
        ValueError: With what to do.
    """
    if percent is None:
        return
    with suppress(ValueError):
        if float(percent) >= WHOLE:
            return
    raise ValueError(
        f"{PROCESSORS}={percent}: with a part of a GPU's processors log-probs were NaN (1.7B on an H200, 75 percent)."
        " Unset it: processes may share a GPU, with or without NVIDIA's Multi-Process Service, if each may use all of"
        " it."
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels that were compiled for `architecture` run on a GPU of this compute capability.

    Machine code runs within its major version on the same or a later minor one, PTX is compiled for whatever is newer;
    with the suffix "a" both are for that one capability, with "f" for its family (CUDA C++ programming guide, 3.1).

    Example:
        ``runs_on("sm_86", (8, 9))``, but neither ``runs_on("sm_86", (8, 0))`` nor ``runs_on("sm_86", (9, 0))``
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    kind, suffix, least = found[1], found[4], (int(found[2]), int(found[3]))
    if suffix == "a":
        return capability == least
    return capability >= least and (capability[0] == least[0] or (kind == "compute" and not suffix))


def check_architecture(facts: DeviceFacts) -> None:
    """Refuse a GPU that torch has no kernels for.

    Raises:
        ValueError: Naming the GPU, its compute capability and what torch is compiled for.
    """
    for gpu in facts.gpus:
        if facts.architectures and not any(runs_on(name, gpu.capability) for name in facts.architectures):
            raise ValueError(
                f"torch {facts.torch} has no kernels for the GPU {gpu.name}, whose compute capability is"
                f" {version_text(gpu.capability)}: it is compiled for {' '.join(facts.architectures)}. Leave this GPU"
                f" out with CUDA_VISIBLE_DEVICES, {ON_CPU}."
            )


def check_precision(facts: DeviceFacts, precision: str) -> None:
    """Refuse bf16 on GPUs that compute it in software.

    Args:
        facts: The machine's.
        precision: A `MegatronPrecision` by name.

    Raises:
        ValueError: Naming the GPU, its compute capability and the one that is needed.
    """
    if not precision.startswith("bf16"):
        return
    for index, gpu in enumerate(facts.gpus):
        if gpu.capability < BF16_CAPABILITY:
            raise ValueError(
                f"precision={precision!r} on GPU {index} ({gpu.name}), whose compute capability is"
                f" {version_text(gpu.capability)}: bf16 needs {version_text(BF16_CAPABILITY)} (Ampere) or newer."
                " Use precision='16-mixed' or '32-true', or another GPU."
            )


def check_engine_precision(facts: DeviceFacts, dtype: str) -> None:
    """Refuse a sampler in bf16 on GPUs that vLLM does not run it on.

    Args:
        facts: The machine's, with the GPUs that the engine is on.
        dtype: Of the engine's weights.

    Raises:
        ValueError: Naming the GPU, its compute capability and the one that is needed.
    """
    if dtype != "bfloat16":
        return
    for gpu in facts.gpus:
        if gpu.capability < BF16_CAPABILITY:
            raise ValueError(
                f"the engine samples in {dtype} on the GPU {gpu.name}, whose compute capability is"
                f" {version_text(gpu.capability)}: bf16 needs {version_text(BF16_CAPABILITY)} (Ampere) or newer. Set"
                " the engine's dtype='float16' ('auto' is the checkpoint's), or 'float32', or use another GPU."
            )


def check_low_precision(facts: DeviceFacts, fp8: object, fp8_recipe: str, fp4: object) -> None:
    """Refuse fp8 and fp4 on GPUs that have no units for them.

    Args:
        facts: The machine's.
        fp8: `TransformerConfig.fp8`; None or empty means that it is not used.
        fp8_recipe: `TransformerConfig.fp8_recipe`.
        fp4: `TransformerConfig.fp4`.

    Raises:
        ValueError: Naming the GPU, its compute capability and the one that is needed.
    """
    needs = []
    if fp8:
        needs.append((f"fp8 with fp8_recipe={fp8_recipe!r}", FP8_CAPABILITIES.get(fp8_recipe, (8, 9))))
    if fp4:
        needs.append(("fp4", FP4_CAPABILITY))
    for what, needed in needs:
        for index, gpu in enumerate(facts.gpus):
            if gpu.capability < needed:
                raise ValueError(
                    f"train.model_config: {what} on GPU {index} ({gpu.name}), whose compute capability is"
                    f" {version_text(gpu.capability)}: it needs {version_text(needed)} or newer. Remove it (bf16-mixed"
                    " alone runs here), choose another recipe, or another GPU."
                )


def check_transformer_engine(facts: DeviceFacts) -> None:
    """Refuse a Transformer Engine that is missing or does not fit the installed torch.

    Raises:
        RuntimeError: With what its import said and how to compile it again.
    """
    engine = facts.transformer_engine
    if engine is None:
        raise RuntimeError(
            f"Transformer Engine is not installed: {GPU_SETUP}, or take torch's layers with"
            " train.layer_backend='torch'."
        )
    if engine.error is not None:
        raise RuntimeError(
            f"Transformer Engine {engine.version} cannot be imported with torch {facts.torch}: {engine.error}\nIts"
            " extension belongs to the torch that it was compiled with. Compile it again (docs/cuda.md, 'CUDA: what"
            " is special'), or take torch's layers with train.layer_backend='torch'."
        )


def check_vllm(facts: DeviceFacts) -> None:
    """Refuse a vLLM whose kernels are linked against another CUDA than torch's.

    Raises:
        RuntimeError: With both versions and what to install.
    """
    if facts.vllm is None or facts.vllm.cuda_major is None or facts.torch_cuda is None:
        return
    if facts.vllm.cuda_major != facts.torch_cuda[0]:
        raise RuntimeError(
            f"vLLM {facts.vllm.version} is built for CUDA {facts.vllm.cuda_major}, torch {facts.torch} for CUDA"
            f" {version_text(facts.torch_cuda)}: install the two that belong together: {GPU_SETUP}."
        )


def peer_warnings(facts: DeviceFacts) -> list[str]:
    """Return a warning for each slow connection between the GPUs, with the path that is taken instead."""
    warnings = [
        f"GPUs {first} and {second} cannot read each other's memory (no NVLink, no PCIe peer access): NCCL goes through"
        " host memory, at a fraction of the speed. Keep tensor and context parallelism within GPUs that can, and prefer"
        " pipeline and data parallelism across others."
        for first, second in facts.without_peer_access
    ]
    reachable = {pair: link for pair, link in facts.links.items() if pair not in facts.without_peer_access}
    over_pcie = [pair for pair, link in sorted(reachable.items()) if not link.startswith("NV")]
    if over_pcie:
        pairs = ", ".join(f"{first}-{second} ({reachable[first, second]})" for first, second in over_pcie)
        warnings.append(
            f"no NVLink between GPUs {pairs}: peers talk over PCIe, some ten times slower. Prefer pipeline and data"
            " parallelism across them."
        )
    return warnings
