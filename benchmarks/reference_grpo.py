"""GRPO in one file of plain torch and Transformers: no Megatron, no vLLM, no Lightning. `learning_curves.py` compares.

    python benchmarks/reference_grpo.py --model runs/learning/model --out curves.json --seed 0 --device cuda

Only the problems are this project's (`data.arithmetic`, generated rows). Everything else is written again: batches in
the same order, sampling with a key/value cache, the exact-match reward, advantages, loss, AdamW, clipping, schedule.
"""

import argparse
import copy
import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.data.arithmetic import arithmetic_rows

Model = Any  # a Qwen3ForCausalLM


@dataclass(frozen=True)
class Settings:
    """Everything that shapes a run; the defaults are those of `arithmetic_runs.own_job`, which a test compares."""

    seed: int = 0
    rollouts: int = 150
    prompts: int = 128  # per rollout
    generations: int = 8  # per prompt
    updates: int = 2  # per rollout
    max_prompt_tokens: int = 16
    max_tokens: int = 6  # of a response
    temperature: float = 1.0
    lr: float = 3e-4  # at its highest
    warmup_share: float = 0.15  # of the rollouts
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    kl_coef: float = 0.001
    digits: int = 2  # of an operand, at most
    subtraction: int = 0  # 1: differences as well as sums
    train_rows: int = 3500
    val_rows: int = 500
    val_every: int = 5  # rollouts
    staleness: int = 0  # rollouts between the policy that samples and the one that is updated
    cap: float = 2.0  # of the tokens' importance weights π / π_sampler; 0: no weights


@dataclass
class Responses:
    """What was sampled: `tokens` are prompts padded on the left, then responses padded on the right."""

    tokens: Tensor  # [samples, prompt + response] int64
    attention_mask: Tensor  # [samples, prompt + response] int64
    mask: Tensor  # [samples, response] bool, up to and with the end-of-sequence token
    texts: list[str]

    def part(self, rows: slice) -> "Responses":
        """Return some of the samples."""
        return Responses(self.tokens[rows], self.attention_mask[rows], self.mask[rows], self.texts[rows])


def epoch_order(num_rows: int, epoch: int, seed: int) -> list[int]:
    """Return the rows of an epoch in the order in which batches take them."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def batch_rows(number: int, settings: Settings) -> list[int]:
    """Return the rows of batch `number`; what is left at an epoch's end is dropped."""
    epoch, index = divmod(number, settings.train_rows // settings.prompts)
    order = epoch_order(settings.train_rows, epoch, settings.seed)
    return order[index * settings.prompts : (index + 1) * settings.prompts]


@torch.no_grad()
def sample(model: Model, tokenizer: Any, prompts: list[str], settings: Settings, *, greedy: bool) -> Responses:
    """Sample `generations` responses to each prompt, or the most likely one; a prompt's stand together."""
    count = 1 if greedy else settings.generations
    inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
    tokens = inputs["input_ids"].repeat_interleave(count, dim=0)
    attention = inputs["attention_mask"].repeat_interleave(count, dim=0)
    width = tokens.shape[1]
    done = torch.zeros(len(tokens), dtype=torch.bool, device=model.device)
    cache, step_input, masks = None, tokens, []
    for _ in range(settings.max_tokens):
        positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -step_input.shape[1] :]
        output = model(step_input, attention_mask=attention, position_ids=positions, past_key_values=cache)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        if greedy:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial(torch.softmax(logits / settings.temperature, -1), 1)[:, 0]
        masks.append(~done)
        drawn = torch.where(done, tokenizer.pad_token_id, drawn)
        tokens = torch.cat([tokens, drawn[:, None]], 1)
        attention = torch.cat([attention, (~done).long()[:, None]], 1)
        done |= drawn == tokenizer.eos_token_id
        step_input = drawn[:, None]
        if done.all():
            break
    texts = tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
    return Responses(tokens, attention, torch.stack(masks, 1), texts)


def token_logprobs(model: Model, responses: Responses, temperature: float) -> Tensor:
    """Return log-probs of the response tokens under the sampled distribution, ``[samples, response]``."""
    count = responses.mask.shape[1]
    positions = (responses.attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        responses.tokens, attention_mask=responses.attention_mask, position_ids=positions, logits_to_keep=count + 1
    ).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return logprobs.gather(2, responses.tokens[:, -count:, None])[:, :, 0]


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (r - mean) / (std + 1e-6) of each row, unbiased std (arXiv:2402.03300)."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-6)


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: Settings,
    weights: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate, weighted, plus KL, and that KL (k3), each as the mean over all response tokens."""
    ratio = (logprobs - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    bounded = torch.minimum(policy, -settings.dual_clip * advantages)
    policy = torch.where(advantages < 0, bounded, policy) * weights
    difference = (reference - logprobs).clamp(-20, 20)
    kl = (difference.exp() - difference - 1).clamp(max=10)
    tokens = mask.sum()
    return ((policy + settings.kl_coef * kl) * mask).sum() / tokens, (kl.detach() * mask).sum() / tokens


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW with decay on matrices only."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def update(
    model: Model,
    optimizer: torch.optim.Optimizer,
    reference_model: Model,
    responses: Responses,
    rewards: Tensor,
    settings: Settings,
    drawn: Tensor | None = None,
) -> dict[str, float]:
    """Take the optimizer steps of one rollout, each on an equal share of its prompts; `rewards` is [prompts, G].

    `drawn` are the log-probs under the policy that has sampled, [samples, response], if that is an older one.
    """
    advantages = group_advantages(rewards).flatten()[:, None]
    with torch.no_grad():
        old = token_logprobs(model, responses, settings.temperature)
        reference = token_logprobs(reference_model, responses, settings.temperature)
    weights = torch.ones_like(old)
    if drawn is not None and settings.cap:
        weights = (old - drawn).clamp(-20, 20).exp().clamp(max=settings.cap)
    size = len(responses.tokens) // settings.updates
    metrics = {}
    for start in range(0, len(responses.tokens), size):
        rows = slice(start, start + size)
        part = responses.part(rows)
        logprobs = token_logprobs(model, part, settings.temperature)
        loss, kl = grpo_loss(logprobs, old[rows], reference[rows], advantages[rows], part.mask, settings, weights[rows])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        metrics = {"loss": loss.item(), "kl_ref": kl.item(), "grad_norm": norm.item()}
    return metrics


def exact_match(texts: list[str], rows: list[dict[str, str]], generations: int) -> list[float]:
    """Return 1.0 where a response is its prompt's answer."""
    answers = [row["answer"] for row in rows for _ in range(generations)]
    return [float(text.strip() == answer) for text, answer in zip(texts, answers, strict=True)]


def lowest_digit_first(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the problems with their answers written from the lowest digit up."""
    return [{**row, "answer": row["answer"][::-1]} for row in rows]


def accuracy(model: Model, tokenizer: Any, rows: list[dict[str, str]], settings: Settings) -> float:
    """Return the share of problems that the most likely responses solve."""
    texts = sample(model, tokenizer, [row["prompt"] for row in rows], settings, greedy=True).texts
    return sum(exact_match(texts, rows, 1)) / len(rows)


def train(directory: Path, settings: Settings, device: str) -> dict[str, Any]:
    """Train and return the curves: [rollouts, held-out accuracy] and [rollouts, mean reward] pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    reference_model = copy.deepcopy(model).eval()
    task: Any = {"num_digits": settings.digits, "subtraction": bool(settings.subtraction)}
    rows = lowest_digit_first(arithmetic_rows("train", settings.train_rows, **task))
    held_out = lowest_digit_first(arithmetic_rows("val", settings.val_rows, **task))
    optimizer = make_optimizer(model, settings)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, settings.rollouts, pct_start=settings.warmup_share, cycle_momentum=False
    )
    recent = deque([copy.deepcopy(model)], maxlen=settings.staleness + 1)  # the oldest samples
    started = time.perf_counter()
    accuracies = [[0, accuracy(model, tokenizer, held_out, settings)]]
    steps = []
    for number in range(settings.rollouts):
        batch = [rows[index] for index in batch_rows(number, settings)]
        responses = sample(recent[0], tokenizer, [row["prompt"] for row in batch], settings, greedy=False)
        rewards = torch.tensor(exact_match(responses.texts, batch, settings.generations), device=device)
        with torch.no_grad():
            drawn = token_logprobs(recent[0], responses, settings.temperature) if settings.staleness else None
        groups = rewards.view(-1, settings.generations)
        metrics = update(model, optimizer, reference_model, responses, groups, settings, drawn)
        scheduler.step()
        recent.append(copy.deepcopy(model))
        steps.append({"reward": rewards.mean().item(), **metrics})
        if (number + 1) % settings.val_every == 0:
            accuracies.append([number + 1, accuracy(model, tokenizer, held_out, settings)])
            print(f"seed {settings.seed} rollout {number + 1}: accuracy {accuracies[-1][1]:.3f}", flush=True)
    return {
        "settings": asdict(settings),
        "accuracy": accuracies,
        "reward": [[index + 1, step["reward"]] for index, step in enumerate(steps)],
        "kl_ref": [[index + 1, step["kl_ref"]] for index, step in enumerate(steps)],
        "grad_norm": [[index + 1, step["grad_norm"]] for index, step in enumerate(steps)],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Run one seed and write its curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with the warm start")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--device", default="cpu")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    directory, out, device = options.pop("model"), options.pop("out"), options.pop("device")
    result = train(directory, Settings(**options), device)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
