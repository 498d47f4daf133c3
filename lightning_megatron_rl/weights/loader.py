"""Loads weights into a vLLM model: on CUDA first by vLLM's loader, then by the copies recorded there."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.compat.torch_names import own_state
from lightning_megatron_rl.weights.borrowed_copies import gather_copies
from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.copy_plan import CopyPlan, record_copies
from lightning_megatron_rl.weights.lent import LentWeight
from lightning_megatron_rl.weights.placement import Placement, view_all

# How vLLM names what keeps weights as they were loaded; everything else works on them after loading.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS_METHOD = "UnquantizedFusedMoEMethod"
_PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")  # kernels that take experts as they come
_LATENT_ATTENTION = "MLAAttention"  # keeps products of its weights


def processed_layers(model: nn.Module) -> list[str]:
    """Return the layers of a vLLM model that change their weights after loading: copies alone do not update them."""
    found = []
    for name, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)  # vLLM's layers with weights have one, others have not
        kind = type(method).__name__
        plain = method is None or kind in _PLAIN_METHODS
        if kind == _EXPERTS_METHOD:
            plain = method.unquantized_backend.name in _PLAIN_EXPERTS
        if not plain or type(layer).__name__ == _LATENT_ATTENTION:
            found.append(name)
    return found


def reload_weights(model_runner: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load all weights by vLLM's layerwise reload, on a worker whose kernels hold weights in a form of their own.

    Args:
        model_runner: The worker's.
        weights: Names and tensors.
    """
    with _no_false_alarms(layers_without_weights(model_runner.model)):
        model_runner.reload_weights(weights_iterator=weights)
    for layer in tied_layers(model_runner.model):
        layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that share their weight, such as an embedding and an output layer that is tied to it.

    vLLM's reload takes a layer for unchanged that gets no weight by a name of its own. On a CPU such a layer would go
    on with the form of the old weight that was made for its product.
    """
    return [layer for sharing in _sharing(model) for layer in sharing]


def _sharing(model: nn.Module) -> list[list[nn.Module]]:
    layers: dict[int, list[nn.Module]] = defaultdict(list)
    for layer in model.modules():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is not None:
            layers[id(weight)].append(layer)
    return [sharing for sharing in layers.values() if len(sharing) > 1]


def layers_without_weights(model: nn.Module) -> set[str]:
    """Return the classes of layers for which no checkpoint of the model has anything, such as tables of rotations.

    Their buffers are computed, or their weight is that of another layer.
    """
    tied = {id(layer) for sharing in _sharing(model) for layer in sharing[1:]}  # the first has the name
    kinds: dict[str, bool] = {}
    for layer in model.modules():
        kind = type(layer).__name__
        kinds[kind] = kinds.get(kind, True) and (not own_state(layer) or id(layer) in tied)
    return {kind for kind, without in kinds.items() if without}


@contextmanager
def _no_false_alarms(kinds: set[str]) -> Iterator[None]:
    """Leave out vLLM's warning at each reload that no weights were loaded for layers of these classes."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def is_true(record: logging.LogRecord) -> bool:
        layer, _, words = record.getMessage().partition(": ")
        return not (layer in kinds and words == "Failed to load weights")

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


class WeightLoader:
    """Updates one vLLM model in place, part by part.

    A model that keeps its weights as they were loaded takes copies into its parameters: those of the first update are
    recorded, and replayed as long as the parts come laid out alike. One that works on its weights after loading takes
    vLLM's layerwise reload, in each update.

    Args:
        model: The model.
        model_config: vLLM's `ModelConfig`.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self.reloads = bool(processed_layers(model))  # layer by layer
        self._plans: list[CopyPlan | None] = []
        self._part = 0
        self._borrowed: Copies | None = None
        self._without_weights: set[str] = set()
        self.was_replayed = False  # whether all parts of the last update were copies recorded before

    def begin(self) -> None:
        """Start an update."""
        self._part, self.was_replayed = 0, not self.reloads
        if self.reloads:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._without_weights = layers_without_weights(self._model)
            initialize_layerwise_reload(self._model)

    def load(self, blocks: Sequence[Tensor], placements: list[Placement], *, keep: bool, stays: bool = False) -> None:
        """Load one part of the weights.

        Args:
            blocks: Memory on the model's device.
            placements: The tensors in it.
            keep: Whether the memory stays as it is until the update ends.
            stays: Whether it stays where it is until `let_go`.
        """
        if self.reloads:
            # vLLM holds what came until it has a whole layer
            tensors = ((place.name, place.tensor(blocks)) for place in placements)
            self._model.load_weights([(name, tensor if keep else tensor.clone()) for name, tensor in tensors])  # type: ignore[operator]
            return
        plan = self._plans[self._part] if self._part < len(self._plans) else None
        if plan is not None and (plan.placements is placements or plan.placements == placements):
            plan.run(blocks, stays=stays)
        else:
            self.was_replayed, self._borrowed = False, None
            del self._plans[self._part :]
            recorded = record_copies(self._model.load_weights, blocks, placements, self._tensors())  # type: ignore[arg-type]
            self._plans.append(recorded)
        self._part += 1

    def borrow(self, weights: Mapping[str, LentWeight], blocks: Sequence[Tensor]) -> list[int] | None:
        """Prepare to copy all weights out of memory that they lie scattered in.

        Args:
            weights: What of them lies where.
            blocks: The memory, on the model's device.

        Returns:
            Bytes that are read out of each block; None: copies alone do not load the model.
        """
        self._borrowed = None
        found = self._gather(weights)
        if found is None:
            return None
        targets, sources = found
        self._borrowed = Copies(targets, view_all(sources, blocks))
        read = [0] * len(blocks)
        for source in sources:
            read[source.block] += source.num_bytes
        return read

    def copies_of(self, weights: Mapping[str, LentWeight], blocks: Sequence[Tensor]) -> list[Copies] | None:
        """Return what is to be copied out of each block, as `borrow` does at once.

        None also where the model's parameters are not where they were when copies were recorded.
        """
        found = self._gather(weights)
        if found is None:
            return None
        there = {tensor.untyped_storage().data_ptr() for tensor in self._tensors()}
        if not all(target.untyped_storage().data_ptr() in there for target in found[0]):
            return None
        pairs: list[tuple[list[Tensor], list[Placement]]] = [([], []) for _ in blocks]
        for target, source in zip(*found, strict=True):
            targets, sources = pairs[source.block]
            targets.append(target)
            sources.append(source)
        return [Copies(targets, view_all(sources, blocks)) for targets, sources in pairs]

    def _gather(self, weights: Mapping[str, LentWeight]) -> tuple[list[Tensor], list[Placement]] | None:
        """Return the copies that were recorded, out of what the weights consist of now."""
        plans = [plan for plan in self._plans if plan is not None]
        if self.reloads or not plans or len(plans) < len(self._plans):
            return None
        return gather_copies(plans, weights)

    def load_borrowed(self) -> None:
        """Load all weights out of the memory that was borrowed."""
        assert self._borrowed is not None
        self._borrowed.run()

    def end(self) -> None:
        """Finish the update; the device has done all copies."""
        if self.reloads:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with _no_false_alarms(self._without_weights):
                finalize_layerwise_reload(self._model, self._model_config)
        torch.accelerator.synchronize()

    def let_go(self) -> None:
        """Drop all references to an update's memory."""
        self._borrowed = None
        for plan in self._plans:
            if plan is not None:
                plan.let_go()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
