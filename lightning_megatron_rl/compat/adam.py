"""An Adam for machines without Transformer Engine or Apex whose checkpoints Megatron's distributed optimizer can load.

Megatron falls back to torch's AdamW, which keeps `step` per parameter; its checkpoint code expects the layout of the
fused optimizers (`step` in the group, `exp_avg` and `exp_avg_sq` per parameter) and stops with `KeyError: 'step'`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) or, with `adam_w_mode`, AdamW (Loshchilov & Hutter 2019), with the fused ones' layout.

    The update is torch's own multi-tensor implementation, so the values are those of `torch.optim.Adam` and `AdamW`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,  # Megatron passes `OptimizerConfig.optimizer_cuda_graph`
    ) -> None:
        if capturable:
            raise ValueError("optimizer_cuda_graph=True needs Transformer Engine's Adam on CUDA: set it to False")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
            update = adamw if self.adam_w_mode else adam
            update(
                parameters,
                [parameter.grad for parameter in parameters],
                [self.state[parameter]["exp_avg"] for parameter in parameters],
                [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
                max_exp_avg_sqs=[],
                # torch counts up before it updates
                state_steps=[torch.tensor(float(group["step"] - 1)) for _ in parameters],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


def install_adam(device: torch.device) -> None:
    """Let Megatron's optimizer factory build `Adam`; nothing is replaced on CUDA with Transformer Engine or Apex.

    The fused optimizers run on CUDA only, so a CPU run never uses them, installed or not.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if device.type == "cuda" and not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = Adam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    # "Apex" stands for the state layout that `Adam` keeps; the Transformer Engine layout has no master weights either,
    # but wants its own classes.
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
