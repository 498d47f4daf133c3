"""LoRA as functions that a gloo worker runs; each returns plain data or CPU tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.models.hf.peft_files import name_experts
from lightning_megatron_rl.models.layers.lora import LoRASettings, adapters_off
from tests.models.workers import batches, build, schedule_logprobs, start_megatron


@torch.no_grad()
def randomize_b(chunks: list[Any]) -> None:
    """Give B values, so that the adapters do something (one tensor-parallel rank: rows are not put in order)."""
    generator = torch.Generator().manual_seed(5)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".adapter.linear_out.weight"):
                parameter.normal_(0, 0.1, generator=generator)


def exported_adapter(model: Any, chunks: list[Any]) -> dict[str, Tensor]:
    """The adapters under the names that they have in PEFT's files."""
    weights, experts = model.export_adapter(chunks)
    return weights | name_experts(experts)


def adapter_logprobs(
    directory: str, sequences: list[list[int]], settings: LoRASettings, target: str, **options: Any
) -> dict[str, Any]:
    """Log-probs without adapters, with new ones, with others, with those switched off; exports of the last."""
    start_megatron()
    batch = batches(sequences, True)
    _, base = build(directory, **options)
    for chunk in base:  # torch multiplies by a weight that wants a gradient in another way
        chunk.requires_grad_(False)
    model, chunks = build(directory, lora=settings, **options)

    def score(scored: list[Any]) -> Any:
        return schedule_logprobs(scored, batch, vocab_size=model.config.vocab_size)

    results = {"base": score(base), "start": score(chunks)}
    randomize_b(chunks)
    results["lora"] = score(chunks)
    with adapters_off(chunks):
        results["off"] = score(chunks)
    frozen = {name: parameter.clone() for name, parameter in chunks[0].named_parameters()}
    model.save_pretrained(chunks, f"{target}/merged")
    model.save_adapter(chunks, f"{target}/adapter", settings)
    results["unchanged"] = all(torch.equal(frozen[name], parameter) for name, parameter in chunks[0].named_parameters())
    results["trainable"] = [name for name, parameter in chunks[0].named_parameters() if parameter.requires_grad]
    results["after"] = score(chunks)
    _, merged = build(f"{target}/merged", **options)
    results["merged"] = score(merged)
    return results


def adapter_gradients(
    directory: str,
    sequences: list[list[int]],
    settings: LoRASettings,
    tp: int = 1,
    target: str | None = None,
    random: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients of the sum of log-probs and entropies, under Hugging Face names: exported in place of the adapters.

    With `random` B has values, and the adapter is written to `target` first.
    """
    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    start_megatron(tp)
    model, [chunk] = build(directory, lora=settings, **options)
    if random:
        randomize_b([chunk])
    if target is not None:
        model.save_adapter([chunk], target, settings)
    chunk.train()
    processor = logprob_processor(vocab_size=model.config.vocab_size, with_entropy=True, chunk_size=11)
    for batch in batches(sequences, True, tp):
        arguments = (batch["tokens"], batch["positions"], batch["labels"], batch["cu"], batch["longest"])
        output = microbatch_forward(chunk, *arguments, output_processor=processor)
        sum(output[:, row, start:end].sum() for row, start, end in batch["places"]).backward()
    with torch.no_grad():
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
            else:
                assert parameter.grad is None
    return exported_adapter(model, [chunk])


def initial_adapter(
    directory: str, settings: LoRASettings, tp: int, pp: int, vpp: int | None = None, ep: int = 1
) -> dict[str, Tensor]:
    """What every rank gets of new adapters, under the names that they have in PEFT's files."""
    start_megatron(tp, pp, vpp, ep=ep)
    model, chunks = build(directory, lora=settings, sp=tp > 1)
    return exported_adapter(model, chunks)


def adapter_error(
    directory: str, settings: LoRASettings, pp: int = 1, ep: int = 1, etp: int | None = None, **options: Any
) -> str:
    """What `build_chunks` says on this rank."""
    start_megatron(pp=pp, ep=ep, etp=etp)
    try:
        build(directory, lora=settings, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def adapter_save_error(directory: str, target: str, settings: LoRASettings) -> str:
    """What `save_adapter` says on this rank."""
    start_megatron(torch.distributed.get_world_size())
    model, chunks = build(directory, lora=settings)
    try:
        model.save_adapter(chunks, Path(target), settings)
    except ValueError as error:
        return str(error)
    return "no error"
