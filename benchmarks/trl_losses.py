"""Losses and gradients of TRL's GRPOTrainer and DPOTrainer on a small random batch, which this project's must equal.

    make peers && PYTHONPATH=.peers python benchmarks/trl_losses.py

Writes results/trl_losses.json: the batch, and of each case TRL's settings, its loss and the gradient by every token's
log-prob, all in float64. tests/test_trl_losses.py computes the same with this project's settings. TRL's own
code runs: `_compute_loss` of both trainers on objects that hold its settings and no model, and the lines of
`_generate_and_score_completions` that make the weights against the sampler's mismatch.
"""

import inspect
import json
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from common import RESULTS, installed
from torch import Tensor

MAX_RESPONSE = 9  # tokens

# by case: what differs from GRPO with clip ranges of 0.2, no KL and no correction
GRPO_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "two_sided": {"loss_type": "dapo", "delta": 1.5},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    "luspo_token": {"loss_type": "luspo"},
    "vespo": {"loss_type": "vespo"},
    "vespo_settings": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.5,
        "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 1.5,
    },
    "kl": {"loss_type": "dapo", "beta": 0.1},
    "kl_weighted": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    "entropy_bonus": {"loss_type": "dapo", "entropy_coef": 0.01},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "off_policy_mask_gspo": {
        "importance_sampling_level": "sequence",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
        "off_policy_mask_threshold": 0.05,
    },
    "top_entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
    "top_entropy_half": {"top_entropy_quantile": 0.5, "beta": 0.1},
    "top_entropy_one": {"loss_type": "dapo", "top_entropy_quantile": 0.0},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"clip_max": 1.2},
    "sequence_truncate": {"clip_max": 1.2},
    "token_mask": {"clip_min": 0.8, "clip_max": 1.25},
    "sequence_mask": {"clip_min": 0.7, "clip_max": 1.5},
}
for _mode, _bounds in CORRECTIONS.items():
    _correction = {"correction": _mode, **_bounds}
    GRPO_CASES[f"dapo_{_mode}"] = {"loss_type": "dapo", "epsilon_high": 0.28, **_correction}
    GRPO_CASES[f"gspo_{_mode}"] = {**GRPO_CASES["gspo"], **_correction}
    if _mode.startswith("token"):  # TRL refuses others
        GRPO_CASES[f"vespo_{_mode}"] = {**GRPO_CASES["vespo"], **_correction}

DPO_CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_norm": {},
    "hinge": {"beta": 0.8},
    "ipo": {},
    "exo_pair": {"label_smoothing": 0.05},
    "nca_pair": {},
    "robust": {"label_smoothing": 0.1},
    "bco_pair": {},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.2},
}


def make_batch() -> dict[str, Tensor]:
    """Six ragged responses of up to nine tokens, one with a hole in its mask, in float64."""
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(6, MAX_RESPONSE, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([9, 4, 1, 7, 6, 3])
    mask = torch.arange(MAX_RESPONSE) < lengths[:, None]
    mask[3, 2] = False
    old = -1 - noise(1.0).abs()
    return {
        "logprobs": old + noise(0.2),
        "old_logprobs": old,
        "rollout_logprobs": old + noise(0.2),
        "ref_logprobs": old + noise(0.5),
        "entropies": noise(2.0).abs().float().double(),  # both sides compare entropies in fp32
        "mask": mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, -0.9, 0.8], dtype=torch.float64),
    }


def correction_weights(batch: dict[str, Tensor], mode: str, clip_min: float | None, clip_max: float) -> Tensor:
    """Run TRL's own lines that make the weights against the mismatch of trainer and sampler."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index("                per_token_logps_diff = (old_per_token_logps")
    lines = source[start : source.index("            # Compute the per-token log probabilities for the reference")]
    names: dict[str, Any] = {
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=clip_min,
            vllm_importance_sampling_clip_max=clip_max,
        ),
        "old_per_token_logps": batch["old_logprobs"],
        "sampling_per_token_logps": batch["rollout_logprobs"],
        "mask": batch["mask"].long(),
        "math": math,
        "torch": torch,
    }
    exec(textwrap.dedent(lines), names)
    weights: Tensor = names["vllm_importance_sampling_ratio"]
    return weights


def grpo_case(batch: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """TRL's loss of the whole batch as one micro-batch, and its gradient."""
    from accelerate import Accelerator
    from trl import GRPOTrainer

    get = settings.get
    logprobs = batch["logprobs"].clone().requires_grad_()
    epsilon = get("epsilon", 0.2)
    trainer: Any = object.__new__(GRPOTrainer)
    trainer.args = SimpleNamespace(
        delta=get("delta"),
        use_bias_correction_kl=get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=get("vespo_k_pos", 2.0),
        vespo_lambda_pos=get("vespo_lambda_pos", 3.0),
        vespo_k_neg=get("vespo_k_neg", 3.0),
        vespo_lambda_neg=get("vespo_lambda_neg", 2.0),
        steps_per_generation=1,
    )
    trainer.loss_type = get("loss_type", "grpo")
    trainer.importance_sampling_level = get("importance_sampling_level", "token")
    trainer.epsilon_low, trainer.epsilon_high = epsilon, get("epsilon_high", epsilon)
    trainer.beta, trainer.entropy_coef = get("beta", 0.0), get("entropy_coef", 0.0)
    trainer.top_entropy_quantile = get("top_entropy_quantile", 1.0)
    trainer.off_policy_mask_threshold = get("off_policy_mask_threshold")
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "correction" in settings
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = SimpleNamespace(training=True)
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = MAX_RESPONSE, 1
    trainer.aux_loss_enabled = trainer.use_adaptive_entropy = False
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, batch["entropies"], None)
    ones = torch.ones_like(batch["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": batch["mask"].long(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"],
        "sampling_per_token_logps": batch["rollout_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    if "correction" in settings:
        weights = correction_weights(batch, settings["correction"], get("clip_min"), settings["clip_max"])
        inputs["importance_sampling_ratio"] = weights
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"settings": settings, "loss": loss.item(), "gradient": gradient.tolist()}


def dpo_case(batch: dict[str, Tensor], loss: str, settings: dict[str, Any]) -> dict[str, Any]:
    """TRL's loss of three pairs, rows 0 to 2 the chosen and 3 to 5 the rejected sides, and its gradient."""
    from accelerate import Accelerator
    from trl import DPOTrainer

    mask = batch["mask"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    ones = torch.ones_like(logprobs)
    trainer: Any = object.__new__(DPOTrainer)
    trainer.args = SimpleNamespace(discopop_tau=settings.get("discopop_tau", 0.05))
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = SimpleNamespace(training=True)
    trainer.aux_loss_enabled = trainer.use_weighting = False
    trainer.precompute_ref_logps, trainer.ld_alpha, trainer.f_divergence_type = True, None, "reverse_kl"
    trainer.beta, trainer.label_smoothing = settings.get("beta", 0.3), settings.get("label_smoothing", 0.0)
    trainer.loss_types, trainer.loss_weights = [loss], [1.0]
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    outputs = SimpleNamespace(
        log_probs=torch.where(mask, logprobs, 0.0), entropy=ones, mean_logits=ones, is_top1=ones.bool()
    )
    prompt = torch.zeros(len(mask), 1, dtype=torch.long)
    references = torch.where(mask, batch["ref_logprobs"], 0.0).sum(1)
    inputs = {
        "input_ids": torch.cat([prompt, ones.long()], dim=1),
        "attention_mask": torch.cat([prompt + 1, mask.long()], dim=1),
        "completion_mask": torch.cat([prompt, mask.long()], dim=1),
        "ref_chosen_logps": references[:3],
        "ref_rejected_logps": references[3:],
    }
    value = trainer._compute_loss(lambda **_: outputs, inputs, False)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"settings": settings, "loss": value.item(), "gradient": gradient.tolist()}


def main() -> None:
    """Run all cases and write them, a case a line."""
    batch = make_batch()
    rows: dict[str, Any] = {
        "command": "python benchmarks/trl_losses.py",
        "versions": {package: installed(package) for package in ("trl", "torch", "transformers")},
        "max_response": MAX_RESPONSE,
        "batch": {name: values.tolist() for name, values in batch.items()},
        "grpo": {name: grpo_case(batch, settings) for name, settings in GRPO_CASES.items()},
        "dpo": {name: dpo_case(batch, name, settings) for name, settings in DPO_CASES.items()},
    }
    for name in ("batch", "grpo", "dpo"):
        cases = ",\n".join(f"    {json.dumps(case)}: {json.dumps(value)}" for case, value in rows[name].items())
        rows[name] = "{\n" + cases + "\n  }"
    for name in ("command", "versions", "max_response"):
        rows[name] = json.dumps(rows[name])
    content = ",\n".join(f"  {json.dumps(name)}: {value}" for name, value in rows.items())
    (RESULTS / "trl_losses.json").write_text("{\n" + content + "\n}\n")
    print(f"{len(GRPO_CASES)} cases of GRPO and {len(DPO_CASES)} of DPO")


if __name__ == "__main__":
    main()
