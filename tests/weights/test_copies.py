"""Many copies at once: the plain lists, and the kernel for CUDA, run by Triton's interpreter on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.copies import Copies
from tests.interpreted import run_interpreted

Pairs = dict[str, tuple[Tensor, Tensor]]


def pairs_of_every_kind(device: str = "cpu", rows: int = 40) -> Pairs:
    """Targets of noise and their sources, by the way in which they lie in memory."""
    generator = torch.Generator(device=device).manual_seed(4)

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return {
        "dense": (noise(rows, 64), noise(rows, 64)),
        "several tiles": (noise(rows, 4, 1024), noise(rows, 4, 1024)),  # of 32768 numbers each
        "fp32": (noise(rows, dtype=torch.float32), noise(rows, dtype=torch.float32)),
        "rows of a group": (noise(rows, 3, 64), noise(rows, 5, 64)[:, 1:4]),
        "columns": (noise(rows, 1028), noise(rows, 2056)[:, 1028:]),
        "into columns": (noise(rows, 2056)[:, :1028], noise(rows, 1028)),
        "from columns into rows of a group": (noise(rows, 5, 64)[:, 2:4], noise(rows, 2, 100)[:, :, 8:72]),
        "experts": (noise(4, 6, 2, 8)[:, 1:5, :1], noise(4, 7, 3, 8)[:, :4, 1:2]),
        "row repeated": (noise(rows, 64), noise(1, 64).expand(rows, 64)),
        "empty": (noise(0, 64), noise(0, 64)),
        # what is not made of words
        "transposed": (noise(64, rows), noise(rows, 64).T),
        "odd columns": (noise(rows, 7), noise(rows, 8)[:, 1:]),
        "one number": (noise(1), noise(1)),
        "other dtype": (noise(rows, 64), noise(rows, 64, dtype=torch.float32)),
    }


NOT_OF_WORDS = ("transposed", "odd columns", "one number", "other dtype")


def check_copies(pairs: Pairs, run: Callable[[], None]) -> None:
    """Change the sources, run, and compare each target with its source, and what lies beside it with what it was."""
    for target, source in pairs.values():
        base = source if source._base is None else source._base
        base.copy_(torch.randn_like(base))
        memory = target if target._base is None else target._base
        beside = memory.clone()
        view = torch.as_strided(beside, target.shape, target.stride(), target.storage_offset())
        view.copy_(source)
        target.zero_()
        target._wanted = beside  # type: ignore[attr-defined]
    run()
    for name, (target, _) in pairs.items():
        memory = target if target._base is None else target._base
        assert torch.equal(memory, target._wanted), name  # type: ignore[attr-defined]


def test_lists_copy_every_kind_every_time():
    pairs = pairs_of_every_kind()
    copies = Copies(*zip(*pairs.values(), strict=True))
    for _ in range(3):
        check_copies(pairs, copies.run)


def interpret() -> None:
    """Run with TRITON_INTERPRET=1, which Triton reads where kernels are defined."""
    from lightning_megatron_rl.weights.copy_kernels import CopyTable, pieces_of, warm_up

    pairs = pairs_of_every_kind()
    pieces = {name: pieces_of(*pair) for name, pair in pairs.items() if name != "other dtype"}
    assert {name for name, found in pieces.items() if found is None} == set(NOT_OF_WORDS) - {"other dtype"}
    assert pieces["empty"] == []
    assert len(pieces["dense"] or ()) == 1
    pairs = {name: pair for name, pair in pairs.items() if name not in NOT_OF_WORDS}
    table = CopyTable([piece for name in pairs for piece in pieces[name] or ()], torch.device("cpu"))
    for _ in range(2):
        check_copies(pairs, table.run)
    CopyTable([], torch.device("cpu")).run()
    warm_up(torch.device("cpu"))


@pytest.mark.deadline(120)
def test_kernel_copies_every_kind():
    run_interpreted(__name__, "interpret")


def test_copies_without_memory_for_a_table_are_made_all_the_same(monkeypatch):
    """A push that failed is followed by another, which must not take the tables for made."""
    from lightning_megatron_rl.weights import copy_kernels

    failures = [torch.OutOfMemoryError("no memory")]

    class Table:
        def __init__(self, *_: object) -> None:
            if failures:
                raise failures.pop()

        def run(self) -> None:
            target.copy_(source)

    monkeypatch.setattr(copy_kernels, "CopyTable", Table)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    target, source = torch.zeros(8), torch.ones(8)
    copies = Copies([target], [source])
    copies.run()
    source += 1
    with pytest.raises(torch.OutOfMemoryError):
        copies.run()
    copies.run()
    assert torch.equal(target, source)


def test_a_tensor_in_too_many_blocks_is_left_to_torch():
    from lightning_megatron_rl.weights.copy_kernels import pieces_of

    target, source = torch.zeros(2000, 2, 8), torch.zeros(2000, 3, 2, 16)[:, 1, :, :8]
    assert pieces_of(target[:1000], source[:1000]) is not None
    assert pieces_of(target, source) is None
