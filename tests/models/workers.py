"""Functions that the tests of this room run on gloo workers; each returns plain data or CPU tensors."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CPU = torch.device("cpu")


def start_megatron(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1) -> None:
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
    )
    model_parallel_cuda_manual_seed(1234)


def build(directory: Path | str, *, sp: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The `HFModel` of `directory` and its chunks, in evaluation mode."""
    from lightning_megatron_rl.models.hf_model import HFModel

    model = HFModel(str(directory))
    chunks = model.build_chunks(params_dtype=dtype, layer_backend="auto", device=CPU, sequence_parallel=sp, **options)
    for chunk in chunks:
        chunk.eval()
    return model, chunks


def batches(sequences: list[list[int]], packed: bool, multiple: int = 1) -> list[dict[str, Any]]:
    """Two micro-batches of different length; each predicts the next token, and `places` says where sequences lie."""
    half = (len(sequences) + 1) // 2
    return [_batch(part, packed, multiple) for part in (sequences[:half], sequences[half:])]


def _batch(sequences: list[list[int]], packed: bool, multiple: int) -> dict[str, Any]:
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
    lengths = [len(row) for row in inputs]
    padding = -sum(lengths) % multiple
    if padding:  # padding is a sequence of its own
        lengths.append(padding)
        inputs.append(torch.zeros(padding, dtype=torch.int64))
        labels.append(torch.zeros(padding, dtype=torch.int64))
    ends = torch.tensor(lengths).cumsum(0)
    cu = F.pad(ends, (1, 0)).to(torch.int32)
    return {
        "tokens": torch.cat(inputs)[None],
        "positions": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": torch.cat(labels)[None],
        "cu": cu,
        "longest": max(lengths),
        "places": [(0, int(cu[i]), int(cu[i + 1])) for i in range(len(sequences))],
    }


def schedule_logprobs(
    chunks: list[Any], micro_batches: list[dict[str, Any]], *, vocab_size: int, temperature: float = 1.0
) -> list[Tensor] | None:
    """Log-probs and entropy [2, tokens] of each sequence through Megatron's schedule; None before the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.logprobs import logprob_processor

    processor = logprob_processor(vocab_size=vocab_size, temperature=temperature, chunk_size=7, with_entropy=True)
    results: list[Tensor] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        arguments = (batch["tokens"], batch["positions"], batch["labels"], batch["cu"], batch["longest"])
        output = microbatch_forward(chunk, *arguments, output_processor=processor)

        def collect(output: Tensor) -> Any:
            results.extend(output[:, row, start:end].clone() for row, start, end in batch["places"])
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


def logprobs_under_layout(
    directory: str, sequences: list[list[int]], packed: bool, tp: int, pp: int, sp: bool, temperature: float
) -> list[Tensor] | None:
    """`schedule_logprobs` of a checkpoint under TP x PP, None on ranks before the last stage."""
    start_megatron(tp, pp)
    model, chunks = build(directory, sp=sp)
    micro_batches = batches(sequences, packed, multiple=tp)
    return schedule_logprobs(chunks, micro_batches, vocab_size=model.config.vocab_size, temperature=temperature)
