"""Chunked vocab-parallel log-probs and entropy against a full softmax: values, gradients, memory and padded columns."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron_rl.models.layers.logprobs import logprob_processor
from tests.distributed import WorkerPool
from tests.models.workers import start_megatron

HIDDEN, LENGTH, BATCH = 16, 12, 3
TOLERANCE = 1e-5  # fp32: the same sums in another order


def problem(vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "hidden": torch.randn(LENGTH, BATCH, HIDDEN, generator=generator),
        "weight": torch.randn(vocab_size, HIDDEN, generator=generator),
        "labels": torch.randint(0, vocab_size, (BATCH, LENGTH), generator=generator),
        "grads": torch.randn(2, BATCH, LENGTH, generator=generator),
    }


def reference(vocab_size: int, temperature: float) -> dict[str, Tensor]:
    """The same by torch's own log_softmax over all logits."""
    given = problem(vocab_size)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    log_p = (hidden.transpose(0, 1) @ weight.T / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, given["labels"][..., None])[..., 0]
    values = torch.stack([chosen, -(log_p.exp() * log_p).sum(-1)])
    values.backward(given["grads"])
    return {"values": values.detach(), "hidden": hidden.grad, "weight": weight.grad}


class Operations(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made, and products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.products: list[weakref.ref[Tensor]] = []

    @property
    def num_alive(self) -> int:
        """Products that somebody still has."""
        return sum(product() is not None for product in self.products)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.products.append(weakref.ref(result))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def run_processor(
    vocab_size: int,
    temperature: float,
    chunk_size: int,
    sp: bool,
    with_entropy: bool,
    dtype: torch.dtype,
    cap: float | None = None,
) -> dict[str, Tensor | int]:
    """Values and this rank's gradients through a real output layer whose padding rows hold large numbers."""
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, rank = dist.get_world_size(), dist.get_rank()
    start_megatron(tp)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    rows = -(-vocab_size // tp)
    layer = ColumnParallelLinear(
        HIDDEN, rows * tp, config=config, init_method=torch.nn.init.zeros_, bias=False, gather_output=False
    )
    given = problem(vocab_size)
    padded = torch.full((rows * tp, HIDDEN), 9.0)
    padded[:vocab_size] = given["weight"]
    with torch.no_grad():
        layer.weight.copy_(padded[rank * rows : (rank + 1) * rows])
    hidden = given["hidden"].chunk(tp)[rank] if sp else given["hidden"]
    hidden = hidden.to(dtype).clone().requires_grad_()
    before = (hidden.detach().clone(), layer.weight.detach().clone())
    processor = logprob_processor(
        vocab_size=vocab_size, temperature=temperature, chunk_size=chunk_size, with_entropy=with_entropy, cap=cap
    )
    inputs = {"hidden_states": hidden, "output_layer": layer, "output_weight": None, "labels": given["labels"]}
    with torch.no_grad(), Operations() as scoring:
        scored = processor(**inputs)
    assert scoring.num_alive == 0
    with Operations() as operations:
        values = processor(**inputs)
        num_kept = operations.num_alive
        values.backward(given["grads"][: len(values)])
    assert operations.num_alive == 0
    assert torch.equal(scored, values)
    assert torch.equal(before[0], hidden.detach())
    assert torch.equal(before[1], layer.weight.detach())
    return {
        "values": values.detach(),
        "hidden": hidden.grad,
        "weight": layer.weight.grad,
        "largest": operations.numel,
        "products": len(operations.products),
        "kept": num_kept,
    }


@pytest.mark.parametrize("chunk_size", [1, 5, 512])
@pytest.mark.parametrize(("vocab_size", "temperature"), [(64, 1.0), (61, 0.6)])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2+sp"])
def test_values_and_gradients_are_those_of_a_full_softmax(
    tp: int, sp: bool, vocab_size: int, temperature: float, chunk_size: int, worker_pool: WorkerPool
):
    expected = reference(vocab_size, temperature)
    results = worker_pool.run(
        run_processor, vocab_size, temperature, chunk_size, sp, True, torch.float32, world_size=tp
    )
    for result in results:
        torch.testing.assert_close(result["values"], expected["values"], atol=TOLERANCE, rtol=TOLERANCE)
    weight = torch.cat([result["weight"] for result in results])
    assert weight[vocab_size:].count_nonzero() == 0
    torch.testing.assert_close(weight[:vocab_size], expected["weight"], atol=TOLERANCE, rtol=TOLERANCE)
    hidden = torch.cat([result["hidden"] for result in results]) if sp else results[-1]["hidden"]
    torch.testing.assert_close(hidden, expected["hidden"], atol=TOLERANCE, rtol=TOLERANCE)


def test_no_tensor_has_the_size_of_the_logits(worker_pool: WorkerPool):
    vocab_size, chunk_size = 64, 4
    [result] = worker_pool.run(run_processor, vocab_size, 1.0, chunk_size, False, True, torch.float32, world_size=1)
    largest_needed = max(vocab_size * HIDDEN, LENGTH * BATCH * HIDDEN, chunk_size * vocab_size)
    assert result["largest"] <= largest_needed < LENGTH * BATCH * vocab_size


@pytest.mark.parametrize("cap", [None, 2.0])
def test_logits_of_a_single_chunk_are_made_once(worker_pool: WorkerPool, cap: float | None):
    tokens = LENGTH * BATCH
    one, two = (
        worker_pool.run(run_processor, 64, 0.7, chunk, False, True, torch.float32, cap, world_size=1)[0]
        for chunk in (tokens, tokens // 2)
    )
    assert (one["products"], one["kept"]) == (3, 1)
    assert (two["products"], two["kept"]) == (8, 0)
    assert torch.equal(one["values"], two["values"])
    assert torch.equal(one["hidden"], two["hidden"])
    torch.testing.assert_close(one["weight"], two["weight"], atol=TOLERANCE, rtol=TOLERANCE)


def test_without_entropy_there_is_one_row(worker_pool: WorkerPool):
    expected = reference(64, 1.0)
    [result] = worker_pool.run(run_processor, 64, 1.0, 5, False, False, torch.float32, world_size=1)
    assert result["values"].shape == (1, BATCH, LENGTH)
    torch.testing.assert_close(result["values"][0], expected["values"][0], atol=TOLERANCE, rtol=TOLERANCE)


def test_bf16_weights_get_a_gradient_that_does_not_depend_on_the_chunk_size(worker_pool: WorkerPool):
    one, many = (
        worker_pool.run(run_processor, 64, 1.0, chunk_size, False, True, torch.bfloat16, world_size=1)[0]
        for chunk_size in (512, 2)
    )
    expected = reference(64, 1.0)["weight"]
    for result in (one, many):
        assert result["values"].dtype == torch.float32
        assert result["weight"].dtype == torch.bfloat16
        # bf16 has 8 bits of mantissa; hidden states, weights and logits are rounded to it before they are multiplied
        torch.testing.assert_close(result["weight"].float(), expected, atol=0.05 * expected.abs().max().item(), rtol=0)
    # each chunk's product is rounded to bf16 once (2^-9 relative), the sum over chunks is not
    scale = one["weight"].float().abs().max().item()
    torch.testing.assert_close(one["weight"].float(), many["weight"].float(), atol=scale * 2**-7, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float):
    with pytest.raises(ValueError, match="temperature"):
        logprob_processor(vocab_size=8, temperature=temperature)


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size=0"):
        logprob_processor(vocab_size=8, chunk_size=0)


def use_a_label_outside() -> None:
    run_with = problem(8)
    run_with["labels"][0, 0] = 8
    layer = torch.nn.Linear(HIDDEN, 8)
    start_megatron()
    from megatron.core import parallel_state

    layer.sequence_parallel = False
    layer.tp_group = parallel_state.get_tensor_model_parallel_group()
    logprob_processor(vocab_size=8)(
        hidden_states=run_with["hidden"], output_layer=layer, output_weight=None, labels=run_with["labels"]
    )


def test_a_label_outside_the_vocabulary_is_refused(worker_pool: WorkerPool):
    with pytest.raises(RuntimeError, match=r"not a token of the vocabulary \[0, 8\)"):
        worker_pool.run(use_a_label_outside, world_size=1)
