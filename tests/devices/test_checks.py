"""Each refusal for the machine's sake, on facts that are made up: no test here needs a GPU."""

from dataclasses import replace

import pytest

from lightning_megatron_rl.devices import checks
from lightning_megatron_rl.devices.facts import GPU, DeviceFacts, Extension, version_text

H100 = GPU("NVIDIA H100 80GB HBM3", (9, 0), total_bytes=85 * 10**9, free_bytes=84 * 10**9)
V100 = replace(H100, name="Tesla V100-SXM2-32GB", capability=(7, 0))
T4 = replace(H100, name="Tesla T4", capability=(7, 5))
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
GOOD = DeviceFacts(
    "2.11.0+cu130",
    torch_cuda=(13, 0),
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),  # of that wheel
    driver=(580, 159, 4),
    gpus=(H100,),
    transformer_engine=Extension("2.20.2"),
    vllm=Extension("0.26.0", cuda_major=13),
    vllm_packages=frozenset({"vllm"}),
)


def test_right_machine_passes_every_check():
    checks.check_driver(GOOD)
    checks.check_cuda(GOOD)
    checks.check_auto(GOOD)
    assert checks.missing_cuda(GOOD) is None
    checks.check_device_count(1, available=1)
    checks.check_architecture(GOOD)
    checks.check_precision(GOOD, "bf16-mixed")
    checks.check_engine_precision(GOOD, "bfloat16")
    checks.check_low_precision(GOOD, "hybrid", "blockwise", None)
    checks.check_transformer_engine(GOOD)
    checks.check_vllm(GOOD)
    assert checks.peer_warnings(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_cuda": None, "torch": "2.11.0+cpu"}, r"torch 2\.11\.0\+cpu finds no CUDA device: it is built for the"),
        ({"hidden": ""}, "CUDA_VISIBLE_DEVICES='' hides"),
        ({"driver": None}, "there is no NVIDIA driver. Install one"),
        ({"driver": (535, 104, 5)}, r"driver 535\.104\.5 is too old for torch .* CUDA 13\.0 needs 580 or newer"),
        ({}, r"the driver is 580\.159\.4. See what nvidia-smi says"),
    ],
)
def test_cuda_that_is_not_there_is_refused_with_the_reason(changes, message):
    with pytest.raises(RuntimeError, match=message) as error:
        checks.check_cuda(replace(GOOD, gpus=(), **changes))
    assert "--trainer.accelerator cpu" in str(error.value)


@pytest.mark.parametrize("percent", [None, "100", "100.0"])
def test_all_processors_may_be_used(percent):
    checks.check_processors(percent)


@pytest.mark.parametrize("percent", ["75", "99.9", "0", "nan", "all", ""])
def test_part_of_the_processors_is_refused(percent):
    with pytest.raises(ValueError, match=rf"^CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}: .* Unset it"):
        checks.check_processors(percent)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"driver": (535, 104, 5)}, True),
        ({"driver": (535, 104, 5), "hidden": "0,1"}, True),
        ({"driver": (535, 104, 5), "hidden": ""}, False),
        ({"driver": (535, 104, 5), "hidden": "-1"}, False),
        ({"driver": (535, 104, 5), "hidden": "NoDevFiles"}, False),
        ({"driver": (535, 104, 5), "hidden": "GPU-5a1c9d3e"}, True),
        ({"driver": (535, 104, 5), "gpus": (H100,)}, False),  # CUDA's forward compatibility
        ({"driver": (535, 104, 5), "torch_cuda": None}, False),
        ({"driver": None}, False),  # a machine without GPUs, whichever torch it has
        ({}, False),
    ],
)
def test_auto_is_no_way_around_a_driver_that_is_too_old(changes, refused):
    facts = replace(GOOD, **{"gpus": (), **changes})
    if not refused:
        checks.check_auto(facts)
        return
    with pytest.raises(RuntimeError, match=r"driver 535\.104\.5 is too old for torch .*accelerator cpu") as error:
        checks.check_auto(facts)
    assert str(error.value) == checks.missing_cuda(facts)


@pytest.mark.parametrize(
    ("cuda", "driver", "fits"),
    [((13, 0), (579, 99), False), ((13, 0), (580,), True), ((12, 8), (525, 60, 13), True), ((12, 1), (470, 1), False)],
)
def test_driver_is_held_to_torchs_cuda(cuda, driver, fits):
    facts = replace(GOOD, torch_cuda=cuda, driver=driver)
    if fits:
        checks.check_driver(facts)
        return
    with pytest.raises(RuntimeError, match="is too old"):
        checks.check_driver(facts)


def test_more_processes_than_gpus_are_refused():
    checks.check_device_count(2, available=2)
    with pytest.raises(ValueError, match=r"4 processes on this node, on which torch sees 2 GPUs.*at most 2"):
        checks.check_device_count(4, available=2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_needs_ampere(precision):
    checks.check_precision(replace(GOOD, gpus=(A100,)), precision)
    with pytest.raises(ValueError, match=rf"'{precision}' on GPU 1 \(Tesla V100.*capability is 7\.0: bf16 needs 8\.0"):
        checks.check_precision(replace(GOOD, gpus=(A100, V100)), precision)
    for other in ("16-mixed", "32-true"):
        checks.check_precision(replace(GOOD, gpus=(T4,)), other)


def test_engine_in_bf16_needs_ampere():
    checks.check_engine_precision(replace(GOOD, gpus=(A100,)), "bfloat16")
    message = r"samples in bfloat16 on the GPU Tesla T4.*is 7\.5: bf16 needs 8\.0.*dtype='float16'"
    with pytest.raises(ValueError, match=message):
        checks.check_engine_precision(replace(GOOD, gpus=(A100, T4)), "bfloat16")
    for other in ("float16", "float32"):
        checks.check_engine_precision(replace(GOOD, gpus=(T4,)), other)


@pytest.mark.parametrize(
    ("architecture", "capabilities", "others"),
    [
        ("sm_75", [(7, 5)], [(7, 0), (8, 0)]),
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0), (1, 20)]),
        ("sm_90a", [(9, 0)], [(9, 1)]),
        ("sm_100f", [(10, 0), (10, 3)], [(12, 0)]),
        ("compute_80", [(8, 0), (8, 6), (12, 0)], [(7, 5)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
        ("compute_100f", [(10, 3)], [(12, 0)]),
        ("gfx942", [], [(9, 4)]),
    ],
)
def test_kernels_run_where_cuda_says_they_do(architecture, capabilities, others):
    assert [runs for runs in capabilities + others if checks.runs_on(architecture, runs)] == capabilities


def test_gpu_without_kernels_is_refused():
    for gpu in (T4, A100, H100):
        checks.check_architecture(replace(GOOD, gpus=(gpu,)))
    message = r"no kernels for the GPU Tesla V100.* is 7\.0: it is compiled for sm_75 sm_80 .* sm_120\. .*_DEVICES"
    with pytest.raises(ValueError, match=message):
        checks.check_architecture(replace(GOOD, gpus=(A100, V100)))
    checks.check_architecture(replace(GOOD, gpus=(V100,), architectures=("sm_70", "sm_75")))
    checks.check_architecture(replace(GOOD, gpus=(V100,), architectures=()))  # not known


@pytest.mark.parametrize(
    ("fields", "gpu", "message"),
    [
        (("hybrid", "delayed", None), A100, r"fp8_recipe='delayed' on GPU 0 .*is 8\.0: it needs 8\.9"),
        (("e4m3", "tensorwise", None), V100, r"is 7\.0: it needs 8\.9"),
        (("hybrid", "mxfp8", None), H100, r"fp8_recipe='mxfp8' .*is 9\.0: it needs 10\.0"),
        ((None, "delayed", "e2m1"), H100, r"fp4 on GPU 0 .*it needs 10\.0"),
    ],
)
def test_low_precision_needs_its_units(fields, gpu, message):
    with pytest.raises(ValueError, match=message):
        checks.check_low_precision(replace(GOOD, gpus=(gpu,)), *fields)


def test_low_precision_that_is_not_asked_for_is_not_checked():
    checks.check_low_precision(replace(GOOD, gpus=(V100,)), None, "delayed", None)
    checks.check_low_precision(GOOD, "hybrid", "delayed", None)


def test_transformer_engine_missing_or_of_another_torch_is_refused():
    with pytest.raises(RuntimeError, match=r"not installed: GPU=1 make setup.*layer_backend='torch'"):
        checks.check_transformer_engine(replace(GOOD, transformer_engine=None))
    broken = Extension("2.20.2", error="undefined symbol: _ZN3c104cuda9SetDeviceEa")
    with pytest.raises(
        RuntimeError, match=r"2\.20\.2 cannot be imported with torch 2\.11\.0.*undefined symbol"
    ) as error:
        checks.check_transformer_engine(replace(GOOD, transformer_engine=broken))
    assert "Compile it again" in str(error.value)


def test_vllm_of_another_cuda_is_refused():
    with pytest.raises(RuntimeError, match=r"vLLM 0\.26\.0 is built for CUDA 12, torch 2\.11\.0\+cu130 for CUDA 13\.0"):
        checks.check_vllm(replace(GOOD, vllm=Extension("0.26.0", cuda_major=12)))
    checks.check_vllm(replace(GOOD, vllm=Extension("0.26.0")))  # a build for the CPU says nothing about CUDA


def test_slow_links_are_warned_about_with_the_path_that_is_taken():
    facts = replace(
        GOOD,
        gpus=(H100,) * 3,
        without_peer_access=((0, 2),),
        links={(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PIX"},
    )
    apart, over_pcie = checks.peer_warnings(facts)
    assert "GPUs 0 and 2 cannot read each other's memory" in apart
    assert "host memory" in apart
    assert "1-2 (PIX)" in over_pcie
    assert "0-1" not in over_pcie


def test_versions_read_as_people_write_them():
    assert version_text((580, 159, 4)) == "580.159.4"
    assert version_text(None) == "none"
