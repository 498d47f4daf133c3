"""verl's side of B3 and B4: its Megatron trainer and vLLM on one GPU or two; same model, prompts, lengths, optimizer.

Used by grpo_step.py and long_tail.py, in a process of its own; prints one line of JSON. Variants are verl's own ways to
be faster; joined by "+" they go together, such as ``--verl-variant awake+fused``. With --config-only nothing runs:
verl's composed configuration is printed, which needs no GPU.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
import verl_worker
from common import SHAPES, TokenPrompts, default_device, summary, write_model
from ours import add_arguments
from peers import search_path
from response_lengths import work as work_of_groups

HERE = Path(__file__).resolve().parent
MODES = ("sync", "colocate_async", "separate_async")
# what verl's documentation names as ways to be faster, beside those that are always on here: batches by tokens, padding
# removed, fused rotary embedding
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "awake": ["actor_rollout_ref.rollout.free_cache_engine=False"],  # the sampler keeps its memory
    "fused": ["actor_rollout_ref.model.use_fused_kernels=True"],  # log-probs without logits
    "workers": ["actor_rollout_ref.rollout.agent.num_workers=8"],
    "bypass": [  # no log-probs before the update, as in ours; of one update for a batch the loss is the same
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type=reinforce",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is=token",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_threshold=2.0",
    ],
    "polling": [],  # its buffer is looked at every 0.1 s in place of every 2 s, which no setting does: see verl_worker
}
POLL_S = 0.1
SEPARATE = [  # a GPU for the trainer, one for its sampler, weights after each step
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=1",
]
PHASES = {"weight_sync": "update_weights", "rollout": "gen", "old_logp": "old_log_prob", "update": "update_actor"}
RESERVE = 4 * 2**30  # bytes that vLLM profiles for its activations, as for TRL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    parser.add_argument("--long-tail", action="store_true", help="lognormal lengths, up to --response-tokens")
    parser.add_argument("--mode", choices=MODES, default="sync", help="verl's trainer")
    parser.add_argument("--bound", type=int, default=0, help="of staleness, of the modes that are asynchronous")
    parser.add_argument("--ahead", type=int, default=1, help="batches that those sample ahead")
    parser.add_argument("--verl-variant", default="plain")
    parser.add_argument("--deadline", type=float, default=400.0, help="seconds")
    parser.add_argument("--config-only", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    command, environment = prepare(options, directory)
    if options.config_only:
        sys.exit(subprocess.run([*command, "--cfg", "job", "--resolve"], env=environment, check=False).returncode)
    run(command, environment, directory, options.deadline)
    print(json.dumps(report(options, directory)), flush=True)


def prepare(options: argparse.Namespace, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Write model, prompts and the agent's settings, and return verl's command and environment.

    Raises:
        ValueError: An unknown variant, or a bound of a synchronous mode.
    """
    names = options.verl_variant.split("+")
    if unknown := sorted(set(names) - set(VARIANTS)):
        raise ValueError(f"--verl-variant {'+'.join(names)}: no {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if (options.bound > 0) != (options.mode != "sync"):
        raise ValueError(f"--mode {options.mode} --bound {options.bound}: sync has 0, the other modes at least 1")
    model = write_model(directory / "model", options.shape)
    rows = TokenPrompts(num_prompts(options), options.prompt_tokens, SHAPES[options.shape]["vocab_size"])()
    write_rows(rows, directory / "rows.parquet")
    agent = [{"name": "tokens", "_target_": "verl_worker.TokensAgentLoop"}]
    (directory / "agent.yaml").write_text(json.dumps(agent))  # JSON is YAML
    (directory / "notes").mkdir()
    more = [setting for name in names for setting in VARIANTS[name]]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(options, model, directory), *more]
    here = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")]), *search_path()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(here),
        "HYDRA_FULL_ERROR": "1",
        "RAY_TMPDIR": str(directory),  # a Ray of its own, beside another side's
        "VERL_USE_EXTERNAL_MODULES": "verl_worker",
        "VERL_FILE_LOGGER_PATH": str(directory / "steps.jsonl"),
        verl_worker.NOTES: str(directory / "notes"),
        verl_worker.LONG_TAIL: str(int(options.long_tail)),
        verl_worker.POLL: str(POLL_S) if "polling" in names else "",
        # at its default level, separate_async with no sampler on the trainer's GPU calls logger.info(..., flush=True)
        **({"VERL_LOGGING_LEVEL": "WARN"} if options.mode == "separate_async" else {}),
    }
    return command, environment


def num_prompts(options: argparse.Namespace) -> int:
    """Return the prompts of the run: what is sampled ahead in the end is not trained on."""
    return int(options.prompts * (options.warmup + options.steps + (options.ahead if options.bound else 0)))


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write prompts as verl's data."""
    import pandas

    table = [
        {
            "data_source": "tokens",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, row in enumerate(rows)
    ]
    pandas.DataFrame(table).to_parquet(path)


def settings(options: argparse.Namespace, model: Path, directory: Path) -> list[str]:
    """Return Hydra's overrides: the numbers that our own side has.

    verl counts the versions that a sample spans, so its threshold is our bound plus one.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    megatron = f"{actor}.megatron.override_transformer_config"
    return [
        "model_engine=megatron",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        f"data.train_files={directory / 'rows.parquet'}",
        f"data.val_files={directory / 'rows.parquet'}",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt_tokens}",
        f"data.max_response_length={options.response_tokens}",
        "data.filter_overlong_prompts=False",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"{actor}.ppo_mini_batch_size={options.prompts}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={options.max_tokens}",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.optim.weight_decay=0.0",
        f"{megatron}.attention_backend=auto",
        f"+{megatron}.apply_rope_fusion=True",
        f"+{megatron}.gradient_accumulation_fusion=False",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={options.generations}",
        f"{rollout}.gpu_memory_utilization={memory_fraction(options, model):.3f}",
        f"{rollout}.max_model_len={options.prompt_tokens + options.response_tokens + 1}",
        f"{rollout}.max_num_seqs={options.prompts * options.generations * (options.bound + 1)}",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.default_agent_loop=tokens",
        f"{rollout}.agent.num_workers=4",
        f"{rollout}.agent.agent_loop_config_path={directory / 'agent.yaml'}",
        f"reward.custom_reward_function.path={HERE / 'verl_worker.py'}",
        "reward.custom_reward_function.name=reward",
        "reward.num_workers=2",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={options.warmup + options.steps}",
        "trainer.total_epochs=1",
        f"trainer.v1.trainer_mode={options.mode}",
        *([f"trainer.v1.{options.mode}.num_warmup_batches={options.ahead}"] if options.bound else []),
        *(SEPARATE if options.mode == "separate_async" else []),
        f"trainer.v1.sampler.max_off_policy_threshold={options.bound + 1}",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        f"ray_kwargs.ray_init.num_cpus={max(8, len(os.sched_getaffinity(0)))}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    ]


def memory_fraction(options: argparse.Namespace, model: Path) -> float:
    """Return the share of the GPU for weights, the same cache as ours, and vLLM's own activations; 0.3 without one."""
    if options.device != "cuda":
        return 0.3
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    total = torch.cuda.get_device_properties(0).total_memory
    return float((weights + options.cache_gb * 2**30 + RESERVE) / total)


def run(command: list[str], environment: dict[str, str], directory: Path, timeout_s: float) -> None:
    """Run verl with its output in ours, and leave no process of it.

    Raises:
        RuntimeError: It failed or took too long; its output came before.
    """
    child = subprocess.Popen(command, stdout=sys.stderr, env=environment, cwd=directory)
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"verl took more than {timeout_s:g} s") from None
    finally:
        end_all(environment[verl_worker.NOTES])
    if code:
        raise RuntimeError(f"verl ended with {code}")


def end_all(notes: str) -> None:
    """End each process that has the run's variables: Ray's are nobody's children when verl is gone."""
    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(verl_worker.NOTES) == notes:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=10)


def report(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return verl's own times of the steps, and what its processes noted of the work.

    Raises:
        RuntimeError: There are fewer steps than were asked for.
    """
    lines = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    steps = [line["data"] for line in lines if "timing_s/step" in line["data"]]
    if len(steps) < options.warmup + options.steps:
        raise RuntimeError(f"verl logged {len(steps)} steps, {options.warmup + options.steps} were asked for")
    kept = steps[options.warmup :]
    seconds = [float(step["timing_s/step"]) for step in steps]
    phases = {ours: [float(step.get(f"timing_s/{theirs}", 0.0)) for step in kept] for ours, theirs in PHASES.items()}
    rest = [whole - sum(each) for whole, *each in zip(seconds[options.warmup :], *phases.values(), strict=True)]
    notes = [
        json.loads(line)
        for path in sorted((directory / "notes").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return {
        "who": f"verl {options.mode}",
        "variant": options.verl_variant,
        "max_staleness": options.bound,
        "shape": options.shape,
        "step_s": summary(seconds[options.warmup :]),
        "seconds": seconds,
        "phases": {name: summary(values) for name, values in {**phases, "everything else": rest}.items()},
        "rewards": [step.get("critic/score/mean") for step in steps],
        "peak_memory_gib": max(float(step.get("actor/perf/max_memory_allocated_gb", 0.0)) for step in steps) or None,
        "staleness": {
            name.rsplit("/", 1)[1]: max(float(step.get(name, 0.0)) for step in kept)
            for name in sorted({name for step in kept for name in step if "off_policy" in name})
        },
        "settings": [
            setting.replace(f"{HERE.parent}{os.sep}", "") for setting in settings(options, Path("model"), Path())
        ],
        "sync": None,  # B1 is not measured of verl
        "work": work_done(options, notes),
    }


def work_done(options: argparse.Namespace, notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was trained on, as our own side tells it; groups of an asynchronous run by the epoch's first."""
    steps = options.warmup + options.steps
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in notes:
        if line["kind"] == "sample" and line["index"] < steps * options.prompts:
            groups[line["index"]].append(line)
    numbers: list[dict[str, Any]] = [line for line in notes if line["kind"] == "numbers"]
    told = {name: value for name, value in (numbers[0] if numbers else {}).items() if name != "kind"}
    told["optimizer_steps"] = sum(line["kind"] == "step" for line in notes)
    if options.long_tail:
        ordered = [sorted(group, key=lambda line: line["place"]) for group in groups.values()]
        lengths = ((group[0]["prompt"], [line["response_tokens"] for line in group]) for group in ordered)
        return {**told, **work_of_groups(lengths)}
    digest = hashlib.sha256()
    samples, tokens = [], []
    for step in range(steps):
        batch = [
            line for index in range(step * options.prompts, (step + 1) * options.prompts) for line in groups[index]
        ]
        digest.update(repr(sorted({tuple(line["prompt"]) for line in batch})).encode())
        samples.append(len(batch))
        tokens.append(sum(line["response_tokens"] for line in batch))
    return {
        "samples_per_step": samples,
        "response_tokens_per_step": tokens,
        "prompt_tokens": options.prompt_tokens,
        "prompts_sha256": digest.hexdigest(),
        **told,
    }


if __name__ == "__main__":
    main()
