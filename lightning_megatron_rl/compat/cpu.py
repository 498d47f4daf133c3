"""Megatron on the CPU: a view of torch, seen only by Megatron's own modules, in which CUDA calls mean the CPU.

Megatron-core calls `torch.cuda.current_device()`, `device="cuda"` and the like in hundreds of places. Two shorter ways
fail: a `TorchFunctionMode` is inactive inside `backward` (activation recomputation crashes), and wrapping `torch.empty`
or `torch.arange` for the whole process corrupts Hugging Face models (their rotary frequencies become garbage).
"""

import contextlib
import functools
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def install_cpu_support(device: torch.device) -> None:
    """Make Megatron run on the CPU if `device` is the CPU; do nothing for CUDA. Later calls do nothing.

    It cannot be taken back: what Megatron has made meanwhile (functions, streams, optimizer classes) is the CPU's.

    Covers modules of Megatron that are imported already and those that are imported later. The choice is the caller's,
    not the machine's: a CPU run on a machine with GPUs works too. Three things of torch change for the whole process:
    `torch.compile` runs eagerly (Megatron compiles its fusions when it is imported, which on a CPU costs minutes of
    g++), and `Tensor.{cuda,pin_memory,record_stream,type}` and `Module.cuda` look at their caller, behaving as before
    unless that is Megatron.

    Raises:
        RuntimeError: `device` is a CUDA device, and Megatron runs on the CPU in this process already.
    """
    installed = any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path)
    if installed and device.type == "cuda":
        raise RuntimeError(
            f"this run is on {device}, and Megatron was adapted to the CPU earlier in this process, by a run with"
            " accelerator='cpu' or by a conversion of weights; that cannot be taken back. Start this run in a new"
            " process (in a notebook: restart the kernel), or convert with the command `lightning-megatron-rl convert`,"
            " which has a process of its own."
        )
    if installed or device.type != "cpu":
        return
    torch.compiler.set_stance("force_eager")
    _patch_methods()
    sys.meta_path.insert(0, _MegatronFinder())
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            _adapt(module)


class _View(types.ModuleType):
    """A module that answers from its own attributes first and from `original` otherwise."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _Stream:
    """A CUDA stream on a device that has none: everything is done when it is asked for."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None: ...


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as CUDA's management calls do on the CPU."""


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with `device="cuda"` read as the CPU and without pinned memory."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


@functools.cache
def _torch_view() -> _View:
    """The torch that Megatron's modules see."""
    stream = _Stream()
    cuda = _View(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        random=_View(torch.cuda.random, get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
        is_available=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: CPU,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda stream: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        get_device_capability=lambda *args: (0, 0),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
        manual_seed_all=_nothing,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
    )
    return _View(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})


class _MegatronLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its file and adapts it before anybody else sees it."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        _adapt(module)


class _MegatronFinder:
    """Finds Megatron's modules where Python would, with a loader that adapts them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _MegatronLoader(spec.loader.name, spec.loader.path)
        return spec


def _adapt(module: types.ModuleType) -> None:
    """Give `module` the view of torch, and replace the few functions that reach CUDA around it."""
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _torch_view()
    adapt = _ADAPTERS.get(module.__name__)
    if adapt is not None:
        adapt(module)


def _adapt_rng(module: types.ModuleType) -> None:
    """The RNG tracker keeps states of the CPU generator; its own functions go through CUDA's lazy calls."""
    module.__dict__.update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)
    # Forking the tracker warns when the CPU generator moved; here it is the generator that is forked.
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _adapt_token_dispatcher(module: types.ModuleType) -> None:
    """The all-to-all dispatcher turns split sizes into numpy only if they come from the GPU."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    module.__dict__["maybe_move_tensor_to_cpu"] = to_host


def _adapt_multi_tensor(module: types.ModuleType) -> None:
    """Where Transformer Engine or Apex is installed, gradients would be normed and scaled by their CUDA kernels."""
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale

    module.__dict__.update(
        multi_tensor_applier=local_multi_tensor_applier,
        l2_norm_impl=local_multi_tensor_l2_norm,
        multi_tensor_scale_impl=local_multi_tensor_scale,
        multi_tensor_scale_tensor_impl=None,
    )


def _adapt_router(module: types.ModuleType) -> None:
    """Where Transformer Engine is installed, routers would multiply by its kernel for CUDA."""
    module.__dict__["te_general_gemm"] = None


def _adapt_mappings(module: types.ModuleType) -> None:
    """Gloo gathers and reduces parts of equal size only; parts of other sizes travel as an uneven all-to-all.

    The experts of ranks that share them by tensor parallelism see as many tokens as the router sends them.
    """
    even_gather, even_reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        output = input_.new_empty(sum(sizes), *input_.shape[1:])
        copies = torch.cat([input_] * group.size())
        torch.distributed.all_to_all_single(output, copies, sizes, [len(input_)] * group.size(), group=group)
        return output

    def reduce_scatter(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        parts = input_.new_empty(group.size() * mine, *input_.shape[1:])
        torch.distributed.all_to_all_single(parts, input_.contiguous(), [mine] * group.size(), sizes, group=group)
        return parts.unflatten(0, (group.size(), mine)).sum(0)

    module.__dict__.update(_gather_along_first_dim=gather, _reduce_scatter_along_first_dim=reduce_scatter)


_ADAPTERS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.optimizer.clip_grads": _adapt_multi_tensor,
    "megatron.core.optimizer.optimizer": _adapt_multi_tensor,
    "megatron.core.tensor_parallel.mappings": _adapt_mappings,
    "megatron.core.tensor_parallel.random": _adapt_rng,
    "megatron.core.transformer.moe.moe_utils": _adapt_router,
    "megatron.core.transformer.moe.token_dispatcher": _adapt_token_dispatcher,
}


def _patch_methods() -> None:
    """Methods that no module-level name leads to: give Megatron's calls, and only those, a meaning on the CPU."""

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    original_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers sort parameters by names like 'torch.cuda.FloatTensor'.
        answer = original_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    _replace_for_megatron(torch.Tensor, "cuda", stay)
    _replace_for_megatron(torch.Tensor, "pin_memory", stay)
    _replace_for_megatron(torch.Tensor, "record_stream", _nothing)
    _replace_for_megatron(torch.Tensor, "type", cuda_type)
    _replace_for_megatron(torch.nn.Module, "cuda", stay)


def _replace_for_megatron(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Let `owner.name` be `replacement` when a module of Megatron calls it, and what it was for everybody else."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (replacement if caller.startswith("megatron.") else original)(self, *args, **kwargs)

    setattr(owner, name, method)
