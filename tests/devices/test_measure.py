"""Facts are read right: real files of this machine where there are any, listings of others as text."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_megatron_rl.devices import measure
from lightning_megatron_rl.devices.elf import cuda_major, needed_libraries
from lightning_megatron_rl.devices.facts import GPU, Extension
from lightning_megatron_rl.devices.measure import (
    count_gpus,
    driver_version,
    import_engine,
    installed_engine,
    installed_vllm,
    measure_devices,
    measure_gpus,
    measure_links,
    parse_numbers,
    parse_processes,
    parse_topology,
    parse_version,
    use_in_words,
)

TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t0-15\t0\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_topology_gives_the_link_of_each_pair():
    assert parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert parse_topology("") == {}


FOUR_GPUS = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV18\tSYS\tSYS\t0-15
GPU1\tNV18\t X \tSYS\tPHB\t0-15
GPU2\tSYS\tSYS\t X \tNV12\t16-31
GPU3\tSYS\tPHB\tNV12\t X \t16-31
"""
UUIDS = [f"{number}a1c9d3e-0000-1111-2222-333344445555" for number in range(4)]


@pytest.mark.parametrize(
    ("visible", "devices", "links"),
    [
        ([0, 1, 2, 3], [0, 1], {(0, 1): "NV18"}),
        ([0, 1, 2, 3], [2, 3], {(2, 3): "NV12"}),  # Trainer(devices=[2, 3])
        ([2, 3], [0, 1], {(0, 1): "NV12"}),  # CUDA_VISIBLE_DEVICES=2,3
        ([3, 1, 0], [2, 0, 1], {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "NV18"}),
        ([3, None, 2], [0, 1, 2], {(0, 2): "NV12"}),  # one is a part of a GPU, with a UUID of its own
    ],
)
def test_links_are_those_between_the_devices_in_use(monkeypatch, visible, devices, links):
    listings = {"--query-gpu=index,uuid": "".join(f"{number}, GPU-{uuid}\n" for number, uuid in enumerate(UUIDS))}
    monkeypatch.setattr(measure, "capture", lambda command: listings.get(command[1], FOUR_GPUS))
    uuids = ["of a part" if number is None else UUIDS[number] for number in visible]
    monkeypatch.setattr(measure, "identity", lambda device: uuids[device.index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: links.get((first, second)) != "SYS")
    found = measure_links(devices)
    assert found.links == links
    assert found.without_peer_access == tuple(pair for pair, link in links.items() if link == "SYS")


def test_links_are_not_guessed_where_nvidia_smi_is_missing(monkeypatch):
    monkeypatch.setattr(measure, "capture", lambda command: None)
    monkeypatch.setattr(measure, "identity", lambda device: UUIDS[device.index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: True)
    assert measure_links([0, 1]).links == {}
    assert parse_numbers("No devices were found\n") == {}


@pytest.mark.parametrize(
    ("listing", "free"), [(f"GPU-{UUIDS[1]}, 2048\n", 2 * 2**30), ("", 7), (f"GPU-{UUIDS[1]}, [N/A]\n", 7)]
)
def test_free_memory_of_an_unused_gpu_is_read_without_taking_some(monkeypatch, listing, free):
    asked = []
    properties = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=80)
    monkeypatch.setattr(measure, "capture", lambda command: f"GPU-{UUIDS[0]}, 1\n{listing}")
    monkeypatch.setattr(measure, "identity", lambda device: UUIDS[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: asked.append(index) or (7, 80))
    assert measure.measure_unused_gpu(1) == GPU("a GPU", (9, 0), total_bytes=80, free_bytes=free)
    assert asked == ([1] if free == 7 else [])  # where nvidia-smi does not list it


@pytest.mark.parametrize(
    ("text", "version"), [("580.159.04", (580, 159, 4)), ("13.0", (13, 0)), ("2.11.0+cu130", (2, 11, 0)), (None, None)]
)
def test_versions_are_numbers(text, version):
    assert parse_version(text) == version


def test_libraries_of_a_real_extension_are_read():
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    libraries = needed_libraries(torch_library)
    assert {"libc.so.6", "libtorch.so"} <= set(libraries)
    with pytest.raises(ValueError, match="is no 64-bit"):
        needed_libraries(Path(__file__))


def test_cuda_is_told_by_its_runtime():
    assert cuda_major(["libc.so.6", "libcudart.so.12"]) == 12
    assert cuda_major(["libc.so.6"]) is None


def test_installed_vllm_is_told_without_importing_it():
    before = "vllm" in sys.modules
    found = installed_vllm()
    assert ("vllm" in sys.modules) == before
    if importlib.util.find_spec("vllm") is None:
        assert found is None
    else:
        assert found is not None
        assert found.version[0].isdigit()


def test_this_machines_facts_agree_with_torch():
    facts = measure_devices(imports=False)
    assert facts.torch == torch.__version__
    assert len(facts.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert facts.torch_cuda == parse_version(torch.version.cuda)
    assert bool(facts.architectures) == bool(facts.gpus)


def test_architectures_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])
    assert measure_devices(imports=False).architectures == ("sm_90", "compute_90")


def test_devices_that_only_nvml_counts_are_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as Lightning has torch ask
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0)
    assert count_gpus() == 0
    assert measure_gpus() == ()


def test_driver_of_the_host_is_none_where_programs_cannot_use_it(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(measure, "DRIVER_FILE", file)
    monkeypatch.setattr(measure, "capture", lambda command: None)
    monkeypatch.setattr(measure, "has_driver_library", lambda: False)
    assert driver_version() is None
    monkeypatch.setattr(measure, "has_driver_library", lambda: True)
    assert driver_version() == (535, 104, 5)


@pytest.fixture
def broken_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `transformer_engine` whose extension was compiled for another torch, first on the path of this process."""
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    sys.modules.pop("transformer_engine", None)  # the import of its part failed, that of the package did not


@pytest.mark.usefixtures("broken_engine")
def test_engine_of_another_torch_is_found_out():
    error = "undefined symbol: _ZN3c10"
    assert import_engine() == Extension("(no version)", error=error)
    in_a_process = installed_engine(imports=True)
    assert in_a_process is not None
    assert in_a_process.error == f"ImportError: {error}"
    assert installed_engine(imports=False) == Extension("(no version)")


def test_memory_of_processes_is_read_and_told():
    listed = "GPU-5a1c, 4711, 2048\nGPU-5a1c, 4712, 512\nGPU-77ff, 4713, 1024\nGPU-5a1c, 4714, [N/A]\n"
    found = parse_processes(listed, "5a1c")
    assert found == {4711: 2 * 2**30, 4712: 2**29}
    said = use_in_words(3, 2**30, 80 * 2**30, 9 * 2**30, 2**29, found)
    assert said.startswith("GPU 3 has 80.0 GiB, of which 1.0 are free. Torch holds 9.0 GiB of it in this process (")
    assert said.endswith("of which 0.5 are in use. GiB by process: 4711: 2.0, 4712: 0.5.")
    assert use_in_words(3, 0, 1, 0, 0, parse_processes("", "5a1c")).endswith("are in use.")
