"""LoRA on Megatron's linear layers: which are adapted, the adapters' initial values, and the model without them.

Low-rank adaptation (Hu et al. 2021) adds ``alpha / rank * B A x`` to the output of a linear layer whose weight W stays
as it is; only A [rank, in] and B [out, rank] are trained. Megatron's `linear_qkv` is one layer, so its query, key and
value share A; the same holds for gate and up in `linear_fc1`. Written as one adapter per projection, each with a copy
of A, that is the same function: this is how it is exported. Each expert of a mixture has adapters of its own.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron_rl.compat.bridge import import_lora
from lightning_megatron_rl.models.hf.files import raise_everywhere
from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, PROBABILITY, SEED, check_ranges

_ALL_LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
_EXPERTS = ".mlp.experts."  # in the name of a layer of an expert, but not of a shared one
_RANGES = {
    "rank": COUNT.called("it is the number of rows of A"),
    "alpha": POSITIVE.called("the adapters' output is scaled by alpha / rank"),
    "dropout": PROBABILITY,
    "seed": SEED,
}


@dataclass(frozen=True)
class LoRASettings:
    """Low-rank adapters on frozen weights.

    Args:
        rank: Columns of B and rows of A; a multiple of the tensor-parallel size, and of the experts' if adapted.
        alpha: The adapter's output is multiplied by alpha / rank.
        dropout: Probability of dropping an input of A in updates; what is drawn depends on the layout.
        target_modules: Megatron's names of linear layers, or patterns of whole names with ``*``, in which layers and
            experts are counted over the whole model: ``*.layers.0.*.linear_qkv`` is the first layer's in every layout.
        dora: Weight-decomposed adapters (DoRA); refused, see docs/lora.md.
        seed: Of the initial values of A, which are the same in every layout. B starts at zero.

    Raises:
        ValueError: A rank below 1, an alpha that is not positive, a dropout outside [0, 1), no targets, or DoRA.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: list(_ALL_LINEAR))
    dora: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "train.lora.")
        if not self.target_modules:
            raise ValueError(f"train.lora.target_modules is empty: name linear layers, e.g. {_ALL_LINEAR}.")
        if self.dora:
            raise ValueError(
                "train.lora.dora=True: Megatron-Bridge 0.6.2 leaves DoRA's magnitudes out of merged and of exported"
                " weights, and takes norms over one tensor-parallel rank's part of a row; sampler and trainer would"
                " differ. Use LoRA (dora=False)."
            )

    def identity(self, base: str) -> dict[str, Any]:
        """Return what must not change between a checkpoint of adapters and a run that resumes from it.

        `base` tells the frozen weights from others.
        """
        return {
            "base model": base,
            "lora.rank": self.rank,
            "lora.alpha": self.alpha,
            "lora.target_modules": sorted(self.target_modules),
        }

    def describe(self) -> str:
        """Return rank and scaling with its arithmetic, for the table at start."""
        return f"rank {self.rank}, output x {self.alpha:g} / {self.rank} = {self.alpha / self.rank:g}"

    def check_layout(self, tensor_model_parallel_size: int) -> None:
        """Raise `ValueError` if the rank cannot be split over the tensor-parallel ranks."""
        if self.rank % tensor_model_parallel_size:
            raise ValueError(
                f"train.lora.rank={self.rank} is split over tensor_model_parallel_size={tensor_model_parallel_size},"
                f" but {self.rank} % {tensor_model_parallel_size} = {self.rank % tensor_model_parallel_size}: use a"
                " multiple."
            )


def check_targets(chunks: list[nn.Module], settings: LoRASettings) -> list[nn.Module]:
    """Return the chunks of a model whose linear layers fit `settings.target_modules`; a collective of all ranks.

    Raises:
        ValueError: A target that matches no layer, a pipeline stage or expert-parallel rank without a target, grouped
            experts, a rank that expert tensor-parallel ranks cannot share, or expert biases that would not stay; on
            all ranks.
    """
    adaptable = [_linear_layers(chunk) for chunk in chunks]
    targeted = [[name for name in layers.values() if _matches(name, settings)] for layers in adaptable]
    everything = (sorted({name for layers in adaptable for name in layers.values()}), [bool(t) for t in targeted])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, everything)
    names = sorted({name for theirs, _ in everywhere for name in theirs})
    for target in settings.target_modules:
        if not any(_fits(target, name) for name in names):
            raise ValueError(
                f"train.lora.target_modules: {target!r} matches no linear layer. There are"
                f" {', '.join(sorted({name.rpartition('.')[2] for name in names}))}, in full for example {names[0]};"
                " a target is one of the former, or a pattern of the latter with *."
            )
    if not all(found for _, founds in everywhere for found in founds):
        raise ValueError(
            f"train.lora.target_modules={settings.target_modules} adapts no layer of some pipeline stage or"
            " expert-parallel rank, which then has nothing to train: use fewer of them, or targets in each."
        )
    raise_everywhere(_expert_problem(chunks[0].config, [name for names in targeted for name in names], settings))
    return chunks


def _expert_problem(config: Any, names: Sequence[str], settings: LoRASettings) -> str | None:
    from megatron.core import parallel_state

    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        return (
            f"moe_router_bias_update_rate={config.moe_router_bias_update_rate:g} changes the routers' expert biases in"
            " every step, but adapters are trained on weights that stay, and saved without them: set the rate to 0."
        )
    experts = [name for name in names if _EXPERTS in name]
    if experts and ".local_experts." not in experts[0]:
        return (
            f"train.lora.target_modules adapts grouped experts ({experts[0]}), whose adapters are not supported: set"
            " train.model_config={'moe_grouped_gemm': False}, or target '*.self_attention.*' only."
        )
    size = parallel_state.get_expert_tensor_parallel_world_size()
    if experts and settings.rank % size:
        return (
            f"train.lora.rank={settings.rank} is split over expert_tensor_parallel_size={size} in experts"
            f" ({experts[0]}), but {settings.rank} % {size} = {settings.rank % size}: use a multiple."
        )
    return None


def add_adapters(chunks: list[nn.Module], settings: LoRASettings) -> None:
    """Freeze the chunks and put an adapter on every targeted layer, in place, before they are wrapped for training.

    Args:
        chunks: What `check_targets` has accepted, on any device.
        settings: Rank, scaling and targets.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        for path, name in _linear_layers(chunk).items():
            if _matches(name, settings):
                parent, _, child = path.rpartition(".")
                wrapped = _wrap(chunk.get_submodule(path), path, name, settings)
                setattr(chunk.get_submodule(parent), child, wrapped)
                _initialize(wrapped.adapter, name, settings)
        if chunk.pre_process:
            chunk.get_submodule("embedding").register_forward_hook(_require_grad)


def _wrap(layer: Any, path: str, name: str, settings: LoRASettings) -> Any:
    """Put a layer and a new adapter into Megatron-Bridge's wrapper, which adds what they return."""
    bridge_lora = import_lora()
    from megatron.bridge.peft.lora_layers import LoRALinear

    from lightning_megatron_rl.models.layers.expert_adapter import ExpertAdapter

    options = {"alpha": settings.alpha, "dropout": settings.dropout}
    if _EXPERTS in name:
        return LoRALinear(layer, ExpertAdapter(layer, name, rank=settings.rank, config=layer.config, **options))
    _return_normalized_input(layer)
    parent, _, child = path.rpartition(".")
    return bridge_lora(target_modules=[child], dim=settings.rank, **options).transform(layer, child, parent)


def _return_normalized_input(layer: nn.Module) -> None:
    """Let a layer with its norm inside hand out what the adapter must see; Bridge knows Transformer Engine's only."""
    from lightning_megatron_rl.models.layers.torch_backend import TorchLayerNormColumnParallelLinear

    if isinstance(layer, TorchLayerNormColumnParallelLinear):
        layer.return_layernorm_output = True


def _require_grad(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    """Start the graph at the embeddings: a recomputed block with no input in the graph never runs its backward."""
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_()
    return hidden


@torch.no_grad()
def _initialize(adapter: Any, name: str, settings: LoRASettings) -> None:
    """Set this rank's part of A, uniform in +-1/sqrt(in) as PEFT has it, drawn whole from the layer's name; B = 0."""
    weight = adapter.linear_in.weight
    dimension = 1 if adapter.input_is_parallel else 0  # the one that is split
    shape = list(weight.shape)
    shape[dimension] *= adapter.tp_group.size()
    whole = initial_weight(shape, f"{settings.seed}/{name}")
    weight.copy_(whole.chunk(adapter.tp_group.size(), dimension)[adapter.tp_group.rank()])
    adapter.linear_out.weight.zero_()


def initial_weight(shape: Sequence[int], key: str) -> Tensor:
    """Return fp32 uniform in +-1/sqrt(``shape[1]``) on the CPU, a function of the key alone."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    bound = 1 / math.sqrt(shape[1])
    # Lightning builds the model with its GPU as the default device, and a CPU generator draws on the CPU alone
    whole = torch.empty(*shape, dtype=torch.float32, device="cpu")
    return whole.uniform_(-bound, bound, generator=generator)


def _linear_layers(chunk: nn.Module) -> dict[str, str]:
    """Layers of a bare chunk that can be adapted: path in the chunk -> name, as counted over the whole model."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    import_lora()  # settles what Bridge knows of Transformer Engine
    from megatron.bridge.peft import utils

    kinds: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear)
    if utils.HAVE_TE:
        kinds += (*utils.TECL, *utils.TERL)
    config: Any = chunk.config
    layers = {}
    for path, module in chunk.named_modules():
        match = re.match(r"decoder\.layers\.\d+", path)
        if match and isinstance(module, kinds):
            layer: Any = chunk.get_submodule(match.group())  # Megatron counts its layers from 1, over all stages
            name = f"decoder.layers.{layer.layer_number - 1}{path[match.end() :]}"
            layers[path] = re.sub(
                r"(?<=\.local_experts\.)\d+", lambda expert: _over_all_ranks(int(expert[0]), config), name
            )
    return layers


def _over_all_ranks(expert: int, config: Any) -> str:
    """The number of one of this rank's experts, as the model counts them."""
    from megatron.core import parallel_state

    here = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return str(expert + here * parallel_state.get_expert_model_parallel_rank())


def _matches(name: str, settings: LoRASettings) -> bool:
    return any(_fits(target, name) for target in settings.target_modules)


def _fits(target: str, name: str) -> bool:
    """Whether a target is the last part of a layer's name, or a pattern of all of it."""
    pattern = ".*".join(re.escape(part) for part in target.split("*"))
    return target == name.rpartition(".")[2] or re.fullmatch(pattern, name) is not None


@contextmanager
def adapters_off(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Let the chunks, wrapped or not, compute what they would without adapters: the frozen weights, bit for bit."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    wrappers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, AdapterWrapper)]
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()
