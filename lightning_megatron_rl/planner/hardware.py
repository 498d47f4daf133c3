"""The GPUs that a plan can be made for: memory, arithmetic and links, from the makers' data sheets."""

import difflib
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU, and the machine around it.

    Args:
        name: As `--device` names it.
        memory_gib: All of it, as the driver reports. # GiB
        tensor_flops: Dense bf16 products of the data sheet. # operations per second
        memory_bytes_per_s: Of the data sheet.
        link_bytes_per_s: To the other GPUs of the machine, in one direction.
        network_bytes_per_s: To other machines, for each GPU, in one direction.
        per_node: GPUs of a machine.
        words: How drivers name it.
    """

    name: str
    memory_gib: float
    tensor_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float = 50e9  # 400 Gbit/s
    per_node: int = 8
    words: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Its memory. # bytes"""
        return int(self.memory_gib * GIB)

    @property
    def free(self) -> int:
        """What a run finds of it: the driver keeps some. # bytes"""
        return int((self.memory_gib - 0.6) * GIB)

    def in_nodes(self, devices: int, nodes: int) -> "Hardware":
        """Return it in machines of so many GPUs, where a run has several; a run on one leaves its others alone."""
        return self if nodes == 1 else replace(self, per_node=devices)


_KINDS = (
    Hardware("a100", 79.3, 312e12, 2.039e12, 300e9, network_bytes_per_s=25e9, words=("A100-SXM4-80GB", "A100 80GB")),
    Hardware("a100-40gb", 39.4, 312e12, 1.555e12, 300e9, network_bytes_per_s=25e9, words=("A100-SXM4-40GB",)),
    Hardware("l40s", 44.4, 362e12, 0.864e12, 25e9, network_bytes_per_s=12.5e9, words=("L40S",)),
    Hardware("h20", 95.6, 148e12, 4.0e12, 450e9, words=("H20",)),
    Hardware("h100", 79.2, 989.4e12, 3.35e12, 450e9, words=("H100 80GB HBM3",)),
    Hardware("h200", 139.8, 989.4e12, 4.8e12, 450e9, words=("H200",)),
    Hardware("b200", 178.4, 2250e12, 8.0e12, 900e9, words=("B200",)),
)
HARDWARE = {kind.name: kind for kind in _KINDS}
"""By name; 80 GB unless the name says otherwise. H100, H200 and A100 are the SXM modules."""


def find_hardware(name: str) -> Hardware:
    """Return a kind of GPU.

    Raises:
        ValueError: There is no such kind here, with the nearest names.

    Example:
        ``find_hardware("H100").memory_gib == 79.2``
    """
    if kind := HARDWARE.get(name.strip().lower()):
        return kind
    near = difflib.get_close_matches(name.lower(), HARDWARE, n=2, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"unknown device {name!r}{hint}; known are {', '.join(HARDWARE)}")


def recognise(driver_name: str) -> Hardware | None:
    """Return the kind of GPU that a driver names so; None if it is none of these.

    Example:
        ``recognise("NVIDIA H200") == HARDWARE["h200"]``
    """
    return next((kind for kind in _KINDS if any(_has(driver_name, word) for word in kind.words)), None)


def _has(driver_name: str, words: str) -> bool:
    """Whether whole words are in a name: an H200 is no H20."""
    return f" {words} " in f" {driver_name} "
