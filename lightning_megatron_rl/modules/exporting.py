"""`PlannedViews`: where a model's weights lie, found out once; and why some ways out of Lightning's are closed."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from lightning_megatron_rl.weights.export_views import ExportViews
    from lightning_megatron_rl.weights.sharded_views import ShardedViews

    type Views = ExportViews | ShardedViews


class PlannedViews:
    """The plan by which pushes read the chunks of a model; it outlives runs, the memory of pushes does not."""

    def __init__(self) -> None:
        # weak references, not addresses: one may be another chunk's later, on one rank and not on the next
        self._chunks: list[weakref.ref[nn.Module]] = []
        self.views: Views | None = None  # None before the first call, and where there can be no plan

    def of(self, chunks: list[nn.Module], plan: "Callable[[list[nn.Module]], Views | None]") -> "Views | None":
        """Return the views of `chunks`, planned if they are not those of the last call, which is a collective."""
        if [chunk() for chunk in self._chunks] != chunks:
            self._chunks, self.views = [weakref.ref(chunk) for chunk in chunks], plan(chunks)
        return self.views

    def let_go(self) -> None:
        """Give the memory of pushes back."""
        if self.views is not None:
            self.views.let_go()


def no_whole_model(name: str) -> str:
    """Return why a module of that name has no export of Lightning's, and what to do in its place."""
    return (
        f"{name} holds this rank's part of a model, without a forward pass of its own: to_onnx, to_torchscript and"
        " to_tensorrt convert a whole one. Export it with the HFExport callback or module.save_pretrained(directory),"
        " and convert that."
    )


def no_single_file(name: str, path: str) -> str:
    """Return why a module of that name is not loaded from a checkpoint, and what to do in its place."""
    return (
        f"{name}.load_from_checkpoint({path!r}): a checkpoint of MegatronStrategy is a directory of shards, which a"
        " Trainer reads: Trainer.fit(module, ckpt_path=...), and so validate, test and predict. To load the weights"
        " elsewhere, export them with the HFExport callback or module.save_pretrained(directory), then"
        f" {name}(model=directory) or from_pretrained."
    )
