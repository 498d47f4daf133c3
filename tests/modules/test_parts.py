"""An update in parts is the update on the whole batch: loss, gradients and weights, in every layout."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.modules import parts as parts_module
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.parts import BY_PARTS, BY_TOKENS, UpdateParts
from lightning_megatron_rl.modules.sharing import Share
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.verify.batch import make_batch
from lightning_megatron_rl.verify.job import Subject
from lightning_megatron_rl.verify.layouts import parse_layout
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE
from tests.strategy.test_overlap import BOTH
from tests.verify import subjects

WHOLE = 400  # tokens of a micro-batch that takes the whole batch; with any other the update is in parts


class InParts(GRPOModule):
    """Takes rollouts in parts, as a stream gives them, unless micro-batches are of `WHOLE` tokens."""

    first_in_parts = True  # False: the first step takes its rollout whole

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> Tensor:
        is_whole = self.train_settings.token_budget == WHOLE
        count = 1 if is_whole or (self.trainer.global_step == 0 and not self.first_in_parts) else 2
        parts = UpdateParts(self.strategy.root_device, count, by_tokens=self.loss_config.aggregation == BY_TOKENS)
        for part in self.rollout(prompts).split(count):
            loss = self.forward_backward(part, parts)
        return loss


def subject(model: Path, layout: dict[str, Any], *, overlap: bool = False, **options: Any) -> Subject:
    from megatron.core.distributed import DistributedDataParallelConfig

    module: Any = subjects.grpo(model, {}, module=InParts, updates_per_rollout=1, **options).module
    module.first_in_parts = not overlap
    ddp = {"ddp_config": DistributedDataParallelConfig(grad_reduce_in_fp32=True, **BOTH)} if overlap else {}
    return Subject(module, MegatronStrategy(**layout, **ddp))


def verify(
    pool: Any,
    model: Path,
    aggregation: str,
    layouts: list[str],
    *,
    device: str = "cpu",
    tolerance: float = RELATIVE,
    **options: Any,
) -> None:
    """Two steps; one process takes the batch whole. One response is empty."""
    loss = GRPOLossConfig(kl_coef=0.1, entropy_coef=0.01, aggregation=aggregation)
    build = partial(subject, model, loss=loss, max_tokens_per_microbatch=WHOLE, **options)
    batch = make_batch(build({}).module, None, processes=4)
    world = max(parse_layout(name).world_size for name in layouts)
    report = verify_layouts(
        build, layouts, batch=batch, pool=pool, processes=world, steps=2, device=device, tolerance=tolerance
    )
    assert report.ok, report
    assert {row.verdict for row in report.rows} == {"reference", "same"}, report


QUICK = [(BY_TOKENS, "single@56"), ("prompt_mean", "dp2@56 pp2_vpp2@56")]
ALL = "single@56 single@160 dp2@56 pp2@56 pp2_vpp2@56 cp2_dp2@80 tp2_sp@160"


@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    ("aggregation", "layouts"),
    by_default(QUICK, [*QUICK, *((name, ALL) for name in (BY_TOKENS, *BY_PARTS))], several=True),
)
def test_parts_add_up_to_the_whole(worker_pool, qwen3_dir, aggregation, layouts):
    """A part has one micro-batch, or several, of which the last is not the last of the update."""
    verify(worker_pool, qwen3_dir, aggregation, layouts.split())


@pytest.mark.deadline(300)
@pytest.mark.parametrize("layout", by_default(["dp2@56"], ["dp2@56", "pp2_dp2@56", "pp2_vpp2_dp2@56"]))
def test_gradients_that_travel_beside_the_backward_pass_wait_for_the_last_part(worker_pool, qwen3_dir, layout):
    """In the first step, which is whole, Megatron counts what a bucket waits for, and overlaps nothing."""
    verify(worker_pool, qwen3_dir, BY_TOKENS, [layout], overlap=True)


def share(lengths: list[int], work: list[float]) -> Share:
    samples: list[Any] = [SimpleNamespace(origin=str(n), token_ids=n, loss_mask=n, fields={}) for n in lengths]
    origins = [(0, index) for index in range(len(lengths))]
    return Share(samples, [], origins, len(lengths), len(work), torch.device("cpu"), sum(lengths), 20, work)


def test_samples_and_shares_of_parts_are_one():
    """A sample of the second part is named by its place behind those of the first."""
    parts = UpdateParts(torch.device("cpu"), 2)
    for number, lengths in enumerate(([5, 7], [3])):
        tally = Tally()
        tally.add_mean("x", torch.tensor([1.0 + 2 * number]))
        assert parts.weigh(sum(lengths)) == 1
        assert parts.gradients.is_last == (number == 1)
        index = torch.tensor([[0, len(lengths) - 1, -1]])
        parts.add(share(lengths, [3.0, 1.0 + 2 * number]), [tally], [(torch.zeros(1, 3), index)])
    assert [sample["origin"] for sample in parts.samples] == ["5", "7", "3"]
    assert [index.tolist() for _, index in parts.token_losses] == [[[0, 1, -1]], [[2, 2, -1]]]
    assert parts.tally is not None
    assert parts.tally.compute() == {"x": 2.0}
    assert parts.metrics() == {"perf/padding_frac": 1 - 15 / 40, "perf/imbalance": 6 / 5}


@pytest.mark.parametrize("tokens", [[4, 8, 12], [0, 8, 4], [8, 4, 0], [0, 0, 0]])
def test_parts_count_as_much_as_each_other(tokens):
    """Each brings N_p = `tokens` times its gradient g_p; what is wanted is the mean of g_p."""
    parts = UpdateParts(torch.device("cpu"), 3, by_tokens=False)
    gradient = sum(parts.weigh(count) * count * value for count, value in zip(tokens, (3.0, 5.0, 7.0), strict=True))
    whole = sum(value for count, value in zip(tokens, (3.0, 5.0, 7.0), strict=True) if count) / 3
    assert parts.gradients.scale * gradient / max(sum(tokens), 1) == pytest.approx(whole)


def test_the_names_are_those_of_the_algorithms():
    """What is added there is refused in parts until it is thought of here."""
    from lightning_megatron_rl.algorithms.advantages import ADVANTAGE_ESTIMATORS
    from lightning_megatron_rl.algorithms.aggregation import AGGREGATIONS

    assert {BY_TOKENS, *BY_PARTS} == set(AGGREGATIONS)
    assert set(parts_module.WITHIN_GROUPS) < set(ADVANTAGE_ESTIMATORS)
