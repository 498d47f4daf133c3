"""Functions that the tests of this folder run on gloo workers; each returns plain data or CPU tensors."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.full_disk import files_of_at_most

CPU = torch.device("cpu")


def start_megatron(
    tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, etp: int | None = None
) -> None:
    """Bring up Megatron's parallel state on the CPU, over the group that the pool has made."""
    from lightning_megatron_rl.compat.adam import install_adam
    from lightning_megatron_rl.compat.cpu import install_cpu_support

    install_cpu_support(CPU)
    install_adam(CPU)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(1234)


def build(
    directory: Path | str,
    *,
    sp: bool = False,
    dtype: torch.dtype = torch.float32,
    verify: Any = "auto",
    **options: Any,
) -> Any:
    """The `HFModel` of `directory` and its chunks, in evaluation mode."""
    from lightning_megatron_rl.models.hf.model import HFModel

    model = HFModel(str(directory), verify=verify)
    chunks = model.build_chunks(params_dtype=dtype, layer_backend="auto", device=CPU, sequence_parallel=sp, **options)
    for chunk in chunks:
        chunk.eval()
    return model, chunks


def batches(sequences: list[list[int]], packed: bool, multiple: int = 1, align: int = 1) -> list[dict[str, Any]]:
    """Two micro-batches of different length; each predicts the next token, and `places` says where sequences lie.

    The tokens of a micro-batch are padded to a `multiple`, those of each packed sequence to a multiple of `align`.
    """
    half = (len(sequences) + 1) // 2
    return [_batch(part, packed, multiple, align) for part in (sequences[:half], sequences[half:])]


def _batch(sequences: list[list[int]], packed: bool, multiple: int, align: int = 1) -> dict[str, Any]:
    inputs = [torch.tensor(sequence[:-1]) for sequence in sequences]
    labels = [torch.tensor(sequence[1:]) for sequence in sequences]
    if not packed:
        longest = max(len(row) for row in inputs)
        longest += -longest % multiple
        tokens, labels_ = (
            torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]) for rows in (inputs, labels)
        )
        positions = torch.arange(longest).expand_as(tokens)
        places = [(row, 0, len(sequence)) for row, sequence in enumerate(inputs)]
        return {
            "tokens": tokens,
            "positions": positions,
            "labels": labels_,
            "cu": None,
            "longest": None,
            "places": places,
        }
    ends = [len(row) for row in inputs]  # without padding
    inputs, labels = ([F.pad(row, (0, -len(row) % align)) for row in rows] for rows in (inputs, labels))
    lengths = [len(row) for row in inputs]
    padding = -sum(lengths) % multiple
    if padding:  # padding is a sequence of its own
        lengths.append(padding)
        inputs.append(torch.zeros(padding, dtype=torch.int64))
        labels.append(torch.zeros(padding, dtype=torch.int64))
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return {
        "tokens": torch.cat(inputs)[None],
        "positions": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": torch.cat(labels)[None],
        "cu": cu,
        "longest": max(lengths),
        "places": [(0, int(start), int(start) + end) for start, end in zip(cu, ends, strict=False)],
    }


def _share(batch: dict[str, Any], cp: int, cp_rank: int) -> dict[str, Any]:
    """The zigzag share of a packed micro-batch that context-parallel rank `cp_rank` holds; `order` undoes the cut."""
    from lightning_megatron_rl.models.layers.packed_attention import zigzag_positions

    starts, lengths = batch["cu"][:-1].tolist(), batch["cu"].diff().tolist()
    held = [
        torch.cat([start + zigzag_positions(n, cp, rank) for start, n in zip(starts, lengths, strict=True)])
        for rank in range(cp)
    ]
    parts = {name: batch[name][:, held[cp_rank]] for name in ("tokens", "positions", "labels")}
    return {**batch, **parts, "order": torch.cat(held).argsort()}


def _whole(output: Tensor, order: Tensor) -> Tensor:
    """Output [2, b, tokens / cp] of all context-parallel ranks, in the order of the sequences."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parts = [torch.empty_like(output) for _ in range(parallel_state.get_context_parallel_world_size())]
    dist.all_gather(parts, output.contiguous(), group=parallel_state.get_context_parallel_group())
    return torch.cat(parts, dim=-1)[..., order]


def schedule_logprobs(
    chunks: list[Any],
    micro_batches: list[dict[str, Any]],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    cap: float | None = None,
) -> list[Tensor] | None:
    """Log-probs and entropy [2, tokens] of each sequence through Megatron's schedule; None before the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    processor = logprob_processor(
        vocab_size=vocab_size, temperature=temperature, chunk_size=7, with_entropy=True, cap=cap
    )
    results: list[Tensor] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        arguments = (batch["tokens"], batch["positions"], batch["labels"], batch["cu"], batch["longest"])
        output = microbatch_forward(chunk, *arguments, output_processor=processor)

        def collect(output: Tensor) -> Any:
            whole = _whole(output, batch["order"]) if "order" in batch else output
            results.extend(whole[:, row, start:end].clone() for row, start, end in batch["places"])
            return output.sum(), torch.tensor(1), {}

        return output, collect

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0]["tokens"].size(1),
            micro_batch_size=micro_batches[0]["tokens"].size(0),
            forward_only=True,
        )
    return results or None


def families_under_layout(
    directories: dict[str, str], sequences: list[list[int]], sp: bool, layout: dict[str, int], verify: Any = None
) -> dict[str, tuple[list[Tensor] | None, list[Tensor] | None, dict[str, Tensor]]]:
    """Of each checkpoint: `schedule_logprobs` of padded and of packed batches, and every weight as exported."""
    from megatron.core import parallel_state

    start_megatron(**layout)
    cp = layout.get("cp", 1)
    results = {}
    for family, directory in directories.items():
        model, chunks = build(directory, sp=sp, verify=verify)  # None: what is returned is compared
        options = {"vocab_size": model.config.vocab_size, "temperature": 0.7, "cap": model.logit_cap}
        padded = packed = None
        if cp == 1:  # under context parallelism everything is packed
            padded = schedule_logprobs(chunks, batches(sequences, False, layout.get("tp", 1)), **options)
        micro_batches = batches(sequences, True, 2 * cp * layout.get("tp", 1), align=2 * cp)
        if cp > 1:
            micro_batches = [_share(batch, cp, parallel_state.get_context_parallel_rank()) for batch in micro_batches]
        packed = schedule_logprobs(chunks, micro_batches, **options)
        results[family] = (padded, packed, {name: tensor.clone() for name, tensor in model.export_weights(chunks)})
    return results


def logprobs_under_layout(
    directory: str, sequences: list[list[int]], tp: int, pp: int, sp: bool, temperature: float
) -> list[list[Tensor] | None]:
    """`schedule_logprobs` of padded and of packed batches under TP x PP, None on ranks before the last stage."""
    start_megatron(tp, pp)
    model, chunks = build(directory, sp=sp)
    return [
        schedule_logprobs(
            chunks, batches(sequences, packed, tp), vocab_size=model.config.vocab_size, temperature=temperature
        )
        for packed in (False, True)
    ]


def equal_length_logprobs(directory: str, sequences: list[list[int]], pp: int, vpp: int) -> list[Tensor] | None:
    """Log-probs under virtual pipeline stages, whose micro-batches must have one length."""
    start_megatron(pp=pp, vpp=vpp)
    model, chunks = build(directory)
    assert len(chunks) == vpp
    micro_batches = [_batch(sequences[i : i + 2], True, 1) for i in range(0, len(sequences), 2)]
    return schedule_logprobs(chunks, micro_batches, vocab_size=model.config.vocab_size)


def exported_gradients(
    directory: str, sequences: list[list[int]], packed: bool, tp: int, **options: Any
) -> dict[str, Tensor]:
    """Gradients of the sum of log-probs and entropies, under Hugging Face names: exported in place of the weights."""
    import torch.distributed as dist

    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    start_megatron(tp)
    model, [chunk] = build(directory, sp=tp > 1, **options)
    chunk.train()
    processor = logprob_processor(
        vocab_size=model.config.vocab_size, with_entropy=True, chunk_size=11, cap=model.logit_cap
    )
    for batch in batches(sequences, packed, tp):
        arguments = (batch["tokens"], batch["positions"], batch["labels"], batch["cu"], batch["longest"])
        output = microbatch_forward(chunk, *arguments, output_processor=processor)
        sum(output[:, row, start:end].sum() for row, start, end in batch["places"]).backward()
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of a shape that the schedule of a later job cannot write to
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            of_all_ranks = getattr(parameter, "sequence_parallel", False) or ".q_layer" in name or ".k_layer" in name
            if tp > 1 and of_all_ranks:
                dist.all_reduce(parameter.grad)  # of its tokens or its heads, as finalize_model_grads does in training
            parameter.copy_(parameter.grad)
    return {name: tensor.clone() for name, tensor in model.export_weights([chunk])}


def exported_weights(
    directory: str, tp: int, pp: int, vpp: int | None = None, dtype: torch.dtype | None = None, **options: Any
) -> dict[str, Tensor]:
    """What every rank gets from `export_weights`."""
    start_megatron(tp, pp, vpp)
    model, chunks = build(directory, sp=tp > 1, **options)
    return {name: tensor.clone() for name, tensor in model.export_weights(chunks, dtype)}


def save_under_layout(directory: str, target: str, tp: int, pp: int, **options: Any) -> None:
    """Load a checkpoint and save it again."""
    start_megatron(tp, pp)
    model, chunks = build(directory)
    model.save_pretrained(chunks, target, **options)


def save_until_files_are_too_large(directory: str, target: str, limit: int) -> tuple[str, list[str]]:
    """The error that each rank gets when rank 0 cannot write more than `limit` bytes in a file, and what is left."""
    import os

    import torch.distributed as dist

    start_megatron(dist.get_world_size())
    model, chunks = build(directory)
    message = "no error"
    try:
        with files_of_at_most(limit) if dist.get_rank() == 0 else nullcontext():
            model.save_pretrained(chunks, target, max_shard_size=100_000)
    except ValueError as error:
        message = str(error)
    return message, os.listdir(Path(target).parent)


def copies_of_the_model(directory: str, lora: Any) -> list[str]:
    """What was copied with Megatron's config of things that know all weights, while chunks were built."""
    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.models.hf.source import source_class

    copied: list[str] = []

    def note(thing: Any, memo: dict[int, Any]) -> Any:
        copied.append(type(thing).__name__)
        return thing

    start_megatron(1, 1)
    with (
        patch.object(HFModel, "__deepcopy__", note, create=True),
        patch.object(source_class(), "__deepcopy__", note, create=True),
    ):
        _, (chunk,) = build(directory, lora=lora)
    assert all(layer.mlp.experts.config is not chunk.config for layer in chunk.decoder.layers), "nothing was copied"
    return copied


def build_error(directory: str, tp: int, pp: int, **options: Any) -> str:
    """What `build_chunks` says on this rank."""
    start_megatron(tp, pp)
    try:
        build(directory, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def build_errors(
    directories: dict[str, str], layout: dict[str, int], *, sp: bool, dtypes: dict[str, torch.dtype]
) -> dict[str, str]:
    """What `build_chunks` says on this rank of each of several models."""
    start_megatron(**layout)
    errors = {}
    for name, directory in directories.items():
        try:
            build(directory, sp=sp, dtype=dtypes.get(name, torch.float32))
            errors[name] = "no error"
        except ValueError as error:
            errors[name] = str(error)
    return errors


def loaded_and_exported(directory: str, sequences: list[list[int]]) -> tuple[list[Tensor] | None, dict[str, Tensor]]:
    """Log-probs of packed sequences and all weights in fp32, as exported."""
    start_megatron()
    model, chunks = build(directory)
    packed = schedule_logprobs(chunks, batches(sequences, True), vocab_size=model.config.vocab_size)
    return packed, {name: tensor.clone() for name, tensor in model.export_weights(chunks, torch.float32)}


def random_weights(directory: str) -> dict[str, Tensor]:
    """The parameters of a model that is built without loading weights."""
    start_megatron()
    _, [chunk] = build(directory, load_weights=False)
    return {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}


def sinks_of_rank(directory: str) -> tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...]], bool]:
    """The first layer's sinks of a rank, their place in Megatron's checkpoints, and whether they are no copy."""
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    start_megatron(2, etp=1)
    _, [chunk] = build(directory, sp=True)
    key = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    sinks = dict(chunk.named_parameters())[key]
    place = chunk.sharded_state_dict()[key]
    return sinks.detach(), (place.global_shape, place.global_offset), param_is_not_tensor_parallel_duplicate(sinks)


def bf16_logprobs(directory: str, sequences: list[list[int]]) -> list[Tensor] | None:
    """Log-probs in bf16, the chunk wrapped as for mixed precision."""
    from megatron.core.transformer.module import Float16Module

    start_megatron()
    model, [chunk] = build(directory, dtype=torch.bfloat16)
    chunk = Float16Module(chunk.config, chunk).eval()
    return schedule_logprobs([chunk], batches(sequences, True), vocab_size=model.config.vocab_size)


def cached_hub_model(name: str, cache: str) -> str:
    """Where a hub name leads when the hub's cache lies in `cache`."""
    from huggingface_hub import constants

    from lightning_megatron_rl.models.hf.files import local_checkpoint

    usual = constants.HF_HUB_CACHE
    constants.HF_HUB_CACHE = cache
    try:
        return str(local_checkpoint(name))
    except ValueError as error:
        return f"ValueError: {error}"
    finally:
        constants.HF_HUB_CACHE = usual
