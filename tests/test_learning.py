"""The learning benchmarks: the reference is the same algorithm, runs are counted right, and what is committed holds."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from benchmarks import learning_curves, methods, reference_grpo, stream_curves
from benchmarks.arithmetic_runs import ACCURACY, Job, first_reaching, own_job, read_run, run_jobs, write_json
from lightning_megatron_rl.algorithms.kl import kl_penalty
from lightning_megatron_rl.algorithms.policy_losses import ppo_clip
from lightning_megatron_rl.data.loader import GlobalBatches
from lightning_megatron_rl.rewards import ExactMatch
from lightning_megatron_rl.sample import Prompt, Sample
from scripts import methods_table
from tests.command_line import ROOT, build
from tests.modules.runs import MAX_RESPONSE, NUM_GENERATIONS, fit_grpo, parity, recorded_samples

RESULTS = ROOT / "benchmarks" / "results"


# ---- the reference is the same algorithm ---------------------------------------------------------------------------


def test_reference_has_the_settings_of_our_runs(tmp_path):
    """Read off the modules that the command line builds, so that neither a config nor a default can drift."""
    job = own_job("run", tmp_path, tmp_path / "model", seed=3, rollouts=150)
    configs = job.command[job.command.index("fit") :]
    built = build(*configs)
    module, data, trainer = built.model, built.datamodule, built.trainer
    optimizer, loss = module.train_settings.optimizer, module.loss.config
    schedule = built.config["fit"]["model"]["init_args"]["train"]["lr_scheduler"]["init_args"]
    train, held_out = data.train_source, data.val_sources["arithmetic"]
    ours = {
        "seed": data.seed,
        "rollouts": trainer.max_steps,
        "prompts": data.batch_size,
        "generations": module.num_generations,
        "updates": module.updates_per_rollout,
        "max_prompt_tokens": data.max_prompt_length,
        "max_tokens": module.sampling.max_tokens,
        "temperature": module.sampling.temperature,
        "lr": optimizer.lr,
        "warmup_share": schedule["pct_start"],
        "beta1": optimizer.adam_beta1,
        "beta2": optimizer.adam_beta2,
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "clip_norm": trainer.gradient_clip_val,
        "clip_low": loss.clip_range[0],
        "clip_high": loss.clip_range[1],
        "dual_clip": loss.dual_clip,
        "kl_coef": loss.kl_coef,
        "digits": train.num_digits,
        "subtraction": int(train.subtraction),
        "train_rows": train.size,
        "val_rows": held_out.size,
        "val_every": trainer.val_check_interval,
        "staleness": 0 if module.streamed is None else None,
        "cap": loss.correction_options()["cap"],
    }
    assert ours == asdict(reference_grpo.Settings(seed=3))
    assert (loss.correction, loss.weight_level) == ("tis", "token")
    assert (loss.advantage, loss.policy_loss, loss.aggregation) == ("grpo", "ppo_clip", "token_mean")
    assert (loss.kl_estimator, loss.kl_in, loss.entropy_coef) == ("k3", "loss", 0.0)
    assert (schedule["max_lr"], schedule["total_steps"]) == (optimizer.lr, trainer.max_steps)
    assert reference_grpo.lowest_digit_first(reference_grpo.arithmetic_rows("train", train.size)) == train()
    assert reference_grpo.lowest_digit_first(reference_grpo.arithmetic_rows("val", held_out.size)) == held_out()


def test_reference_takes_the_same_prompts():
    settings = reference_grpo.Settings(seed=2)
    batches = GlobalBatches(settings.train_rows, settings.prompts, shuffle=True, seed=settings.seed, drop_last=True)
    for number in (0, 1, 26, 27, 149):  # 27 batches an epoch
        assert reference_grpo.batch_rows(number, settings) == batches[number]


def test_reference_rewards_what_exact_match_does():
    texts = ["521", " 521 ", "52", "", "5211"]
    prompt = Prompt(token_ids=[1], text="57+68=", answer="521", index=0, dataset="train")
    samples = [Sample(prompt, [0], [0.0], text, "stop", 0) for text in texts]
    assert reference_grpo.exact_match(texts, [{"answer": "521"}], len(texts)) == ExactMatch()(samples)


def test_reference_loss_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    settings = reference_grpo.Settings(kl_coef=0.1)
    old, noise, reference = -torch.rand(3, 20, 6, generator=generator, dtype=torch.float64)
    logprobs = (old + noise - 0.5).requires_grad_()
    advantages = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    mask = torch.rand(20, 6, generator=generator) > 0.3
    loss, _ = reference_grpo.grpo_loss(logprobs, old, reference, advantages, mask, settings)
    clips = {"clip_low": settings.clip_low, "clip_high": settings.clip_high, "dual_clip": settings.dual_clip}
    policy, _ = ppo_clip(logprobs, old, advantages.expand_as(old), **clips)
    expected = (policy + settings.kl_coef * kl_penalty(logprobs, reference))[mask].mean()
    # float64 sums of some 80 terms in another order
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, logprobs)[0] for value in (loss, expected)), rtol=1e-12, atol=1e-15
    )


def as_responses(samples: list[Sample], pad_token_id: int) -> reference_grpo.Responses:
    """Recorded samples as the reference lays out its own."""
    width = max(len(sample.prompt.token_ids) for sample in samples)
    rows = torch.full((len(samples), width + MAX_RESPONSE), pad_token_id)
    attention = torch.zeros_like(rows)
    for row, sample in enumerate(samples):
        start, tokens = width - len(sample.prompt.token_ids), sample.prompt.token_ids + sample.response_ids
        rows[row, start : start + len(tokens)] = torch.tensor(tokens)
        attention[row, start : start + len(tokens)] = 1
    return reference_grpo.Responses(rows, attention, attention[:, width:].bool(), [""] * len(samples))


@pytest.mark.parametrize("correction", [None, "tis"])
def test_reference_takes_our_step(worker_pool, qwen3_dir, correction):
    """The same responses and rewards, drawn by another policy: two updates of one rollout give both sides the same
    weights."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"clip_high": 0.28, "kl_coef": 0.1, "entropy_coef": 0.0, "correction": correction}
    ours = worker_pool.run(
        fit_grpo, qwen3_dir, {}, 1, steps=1, loss=options, rewards=[parity], trainer={"gradient_clip_val": 1.0},
        world_size=1, init_process_group=False,
    )[0]  # fmt: skip
    settings = reference_grpo.Settings(
        temperature=0.8, lr=1e-3, beta2=0.999, eps=1e-3, weight_decay=0.01, kl_coef=0.1, generations=NUM_GENERATIONS,
        cap=2.0 if correction else 0.0,
    )  # fmt: skip
    model, frozen = (AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = recorded_samples(4)
    rewards = torch.tensor(parity(samples)).view(-1, NUM_GENERATIONS)
    optimizer = reference_grpo.make_optimizer(model, settings)
    drawn = torch.zeros(len(samples), MAX_RESPONSE)
    for row, sample in zip(drawn, samples, strict=True):
        row[: len(sample.response_ids)] = torch.tensor(sample.response_logprobs)
    metrics = reference_grpo.update(model, optimizer, frozen, as_responses(samples, 0), rewards, settings, drawn)
    assert metrics["grad_norm"] > settings.clip_norm  # clipping took part
    # fp32 sums in another order
    assert ours.steps[0]["policy/loss"] == pytest.approx(metrics["loss"], rel=1e-3, abs=1e-5)
    assert ours.steps[0]["policy/grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    after = model.state_dict()
    assert after.keys() == ours.weights.keys()

    def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
        return sum((left[name] - right[name]).double().square().sum().item() for name in after) ** 0.5

    assert distance(after, ours.weights) < 1e-3 * distance(after, before)


@pytest.mark.parametrize("staleness", [0, 2])
def test_reference_samples_with_weights_that_are_so_old(qwen3_dir, tmp_path, monkeypatch, staleness):
    settings = reference_grpo.Settings(
        rollouts=4, prompts=2, generations=2, train_rows=8, val_rows=2, val_every=4, staleness=staleness, lr=1e-2
    )
    weights, norms = [], []
    real_sample, real_update = reference_grpo.sample, reference_grpo.update

    def norm(model: Any) -> float:
        return sum(parameter.double().norm().item() for parameter in model.parameters())

    def sample(model, *arguments, greedy):
        if not greedy:
            weights.append(norm(model))
        return real_sample(model, *arguments, greedy=greedy)

    def update(model, *arguments):
        norms.append(norm(model))
        assert (arguments[-1] is None) == (staleness == 0)
        return real_update(model, *arguments)

    monkeypatch.setattr(reference_grpo, "sample", sample)
    monkeypatch.setattr(reference_grpo, "update", update)
    monkeypatch.setattr(
        reference_grpo, "exact_match", lambda texts, rows, count: [float(i % 2) for i in range(len(texts))]
    )
    reference_grpo.train(qwen3_dir, settings, "cpu")
    assert len(set(norms)) == settings.rollouts
    assert weights == [norms[max(number - staleness, 0)] for number in range(settings.rollouts)]


# ---- runs and what is counted --------------------------------------------------------------------------------------


def test_jobs_end_at_their_deadline_and_are_not_repeated(tmp_path):
    def script(name: str, text: str) -> Job:
        return Job(name, ["-c", text], tmp_path / name / "curves.json")

    good = script("good", f"open({str(tmp_path / 'good' / 'curves.json')!r}, 'a').write('1')")
    jobs = [good, script("slow", "import time; time.sleep(60)"), script("bad", "raise SystemExit('no such thing')")]
    assert run_jobs(jobs, 3, 3.0) == ["slow", "bad"]
    assert "no such thing" in (tmp_path / "bad" / "curves.log").read_text()
    assert run_jobs([good], 1, 10.0) == []
    assert good.result.read_text() == "1"


def test_methods_are_the_presets_and_ppo(tmp_path):
    jobs = methods.jobs(tmp_path, tmp_path / "model", methods.METHODS, rollouts=100, device="cpu", seed=7)
    assert [job.name for job in jobs] == [f"method_{name}" for name in methods.METHODS]
    assert len(jobs) == len(list((ROOT / "configs" / "algorithms").glob("*.yaml"))) + 1
    dapo = build(*jobs[methods.METHODS.index("dapo")].command[2:])
    assert dapo.model.dynamic_sampling.max_rounds == 3
    (stopping,) = [callback for callback in dapo.trainer.callbacks if hasattr(callback, "stopping_threshold")]
    assert (stopping.monitor, stopping.mode, stopping.stopping_threshold) == (ACCURACY, "max", methods.THRESHOLD)
    ppo = build(*jobs[-1].command[2:])
    assert type(ppo.model).__name__ == "PPOModule"
    assert ppo.trainer.max_steps == 100


def test_summary_of_a_method_counts_refilled_groups():
    run = {
        "accuracy": [[5, 0.5], [10, 0.86], [15, 0.84]],
        "refill_groups": [[1, 3.0], [10, 4.0], [11, 100.0]],
        "abs_logp_diff": [[1, 1e-6], [2, 3e-6]],
        "seconds": 1.0,
    }
    summary = methods.summarise(run)
    assert (summary["rollouts"], summary["accuracy"]) == (10, 0.86)
    assert summary["samples"] == 10 * 1024 + 7 * 8
    assert summary["worst_abs_logp_diff"] == 3e-6
    never = methods.summarise({**run, "accuracy": [[5, 0.5], [10, 0.6]]})
    assert (never["rollouts"], never["accuracy"]) == (None, 0.6)


def test_curves_are_read_off_the_log(tmp_path):
    """An accuracy of 0.9, logged in fp32, has reached 0.9."""
    path = tmp_path / "metrics.csv"
    logged = torch.tensor(0.9).item()
    assert logged < 0.9
    path.write_text(f"step,reward/mean,{ACCURACY}\n1,0.25,\n2,0.5,\n2,,{logged}\n")
    run = read_run(path, 7.0)
    assert (run["accuracy"], run["reward"], run["seconds"]) == ([[2, 0.9]], [[1, 0.25], [2, 0.5]], 7.0)
    assert first_reaching(run["accuracy"], 0.9) == 2


def test_points_of_a_curve_are_lines(tmp_path):
    value = {"curve": [[5, 0.5], [10, 1e-07]], "others": [1, 2, 3], "text": "[ 1, 2 ]", "none": [], "pair": ["a", None]}
    write_json(tmp_path / "out.json", value)
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text) == value
    assert "    [5, 0.5],\n    [10, 1e-07]\n" in text


def test_first_reaching():
    assert first_reaching([[0, 0.3], [5, 0.9], [10, 0.8], [15, 0.95]], 0.85) == 5
    assert first_reaching([[0, 0.3]], 0.85) is None


def test_permutation_test_by_hand():
    assert learning_curves.permutation_p([1, 2], [3, 4]) == pytest.approx(2 / 6)
    assert learning_curves.permutation_p([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]) == 1.0
    five = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert learning_curves.permutation_p(five, [value + 1 for value in five]) == pytest.approx(2 / 252)


def test_streams_are_compared_with_the_synchronous_run():
    even = [[[0, 0.5], [5, 0.7]], [[0, 0.6], [5, 0.8]]]
    lower = [[[0, 0.1], [5, 0.1]], [[0, 0.2], [5, 0.2]]]
    found = stream_curves.compare({"synchronous": even, "shared, 8": lower})
    assert found["synchronous"]["final_accuracy"]["mean"] == pytest.approx(0.65)
    assert found["synchronous"]["final_accuracy"]["p_value"] == 1.0
    assert found["shared, 8"]["mean_accuracy"]["mean"] == pytest.approx(0.15)
    assert found["shared, 8"]["mean_accuracy"]["p_value"] == pytest.approx(2 / 6)


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_a_stream_is_as_old_as_its_bound_lets_it_be(tmp_path):
    """The real thing in a short form."""
    import subprocess

    names = ["synchronous", "shared, 2"]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "stream_curves.py"), "--out", str(tmp_path / "runs"),
         "--results", str(tmp_path), "--variants", *names, "--seeds", "0", "--rollouts", "5", "--sft-steps", "20",
         "--deadline", "700"],
        check=True, timeout=800, cwd=ROOT,
    )  # fmt: skip
    figures = json.loads((tmp_path / "stream_curves_5.json").read_text())
    assert list(figures["curves"]) == names
    assert figures["staleness_max"] == {"shared, 2": 2.0}
    assert (tmp_path / "stream_curves_5.png").read_bytes().startswith(b"\x89PNG")


def test_the_reference_falls_behind_by_command(tmp_path):
    """Runs of the reference alone, which are there already."""
    found = stream_curves.reference_jobs(tmp_path, tmp_path, [0, 2], [0, 1], 5, "cpu", 1e-3)
    for delay, jobs in found.items():
        for seed, job in enumerate(jobs):
            assert job.command[job.command.index("--staleness") + 1] == str(delay)
            assert job.command[job.command.index("--lr") + 1] == "0.001"
            write_json(job.result, {"accuracy": [[0, 0.1], [5, 0.5 - 0.1 * delay + 0.01 * seed]]})
    write_json(tmp_path / "environment_stream_curves_reference.json", {})
    options = argparse.Namespace(seeds=[0, 1], rollouts=5, lr=1e-3, delays=[0, 2], out=tmp_path, results=tmp_path)
    stream_curves.merge_reference(found, options)
    figures = json.loads((tmp_path / "stream_curves_reference_5_lr_0.001.json").read_text())
    assert figures["command"].endswith("--reference --delays 0 2 --rollouts 5 --lr 0.001 --seeds 0 1")
    assert figures["comparison"]["2"]["final_accuracy"]["mean"] == pytest.approx(0.305)
    assert figures["comparison"]["2"]["final_accuracy"]["p_value"] == pytest.approx(2 / 6)


# ---- what is committed ---------------------------------------------------------------------------------------------


def test_learning_curves_lie_within_each_others_noise():
    """Of five seeds and five, no number tells which side they are from, and the figures are those of the curves."""
    figures = json.loads((RESULTS / "learning_curves.json").read_text())
    assert len(figures["seeds"]) == 5
    assert figures["comparison"] == learning_curves.compare(figures["curves"])
    for name, numbers in figures["comparison"].items():
        assert numbers["p_value"] > 0.05, name
    assert (RESULTS / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_streams_lose_what_their_delay_costs():
    """As much as a synchronous GRPO in plain torch whose sampler is so far behind, within two standard errors."""
    ours, reference = (json.loads((RESULTS / f"stream_curves{name}.json").read_text()) for name in ("", "_reference"))
    assert reference["comparison"] == stream_curves.compare(reference["curves"], "0")
    for delay in ("2", "4"):
        for what in ("mean_accuracy", "final_accuracy"):
            synchronous, stream = (ours["comparison"][name][what] for name in ("synchronous", f"separate, {delay}"))
            alone, behind = (reference["comparison"][name][what] for name in ("0", delay))
            sides = (synchronous, stream, alone, behind)
            error = (sum(side["std"] ** 2 for side in sides) / len(ours["seeds"])) ** 0.5
            lost = (synchronous["mean"] - stream["mean"]) - (alone["mean"] - behind["mean"])
            assert abs(lost) < 2 * error, (delay, what)


def test_every_method_has_learnt():
    """Those that were run; the table says of every other that it was not."""
    figures = json.loads((RESULTS / "methods.json").read_text())
    assert set(figures["methods"]) <= set(methods.METHODS)
    for name in set(methods.METHODS) - set(figures["methods"]):
        assert f"{name}.yaml) | not measured |" in methods_table.DOCUMENT.read_text(), name
    for name, row in figures["methods"].items():
        assert row["rollouts"] is not None, name
        assert row["rollouts"] <= figures["max_rollouts"] == methods.MAX_ROLLOUTS, name
        assert {int(step): value for step, value in row["curve"]}[row["rollouts"]] >= methods.THRESHOLD, name


def test_tables_of_the_document_are_those_of_the_figures():
    text = methods_table.DOCUMENT.read_text()
    for name in methods_table.TABLES:
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- end of {name} -->\n") == 1
    assert text == methods_table.with_tables(text), "run scripts/methods_table.py"


@pytest.mark.slow
@pytest.mark.deadline(1500)
def test_methods_learn_in_a_short_form(tmp_path):
    """The real thing on the CPU with fewer rollouts: from the warm start, a third of the way to the full accuracy."""
    import subprocess

    names, out = ["dapo", "gspo", "ppo"], tmp_path / "runs"
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "methods.py"), "--out", str(out), "--results", str(tmp_path),
         "--methods", *names, "--rollouts", "20", "--jobs", "2", "--deadline", "1200"],
        check=True, timeout=1400, cwd=ROOT,
    )  # fmt: skip
    figures = json.loads((tmp_path / "methods.json").read_text())
    assert sorted(figures["methods"]) == names
    for name, row in figures["methods"].items():
        first = row["curve"][0][1]
        assert row["best_accuracy"] > max(0.45, first), name  # the warm start solves a third
        assert row["worst_abs_logp_diff"] < 1e-4, name  # fp32 on both sides


def test_configs_of_runs_are_plain_yaml(tmp_path):
    own_job("run", tmp_path, Path("model"), stop_at=0.85)
    overlay = yaml.safe_load((tmp_path / "run" / "overlay.yaml").read_text())
    assert overlay["trainer"]["precision"] == "32-true"  # on a GPU, too
    assert overlay["model"]["init_args"]["train"]["layer_backend"] == "torch"  # fp32 without TF32 on CUDA


def test_a_delay_bears_a_lower_learning_rate():
    """At three times the usual one it ruins runs of both sides alike; without it none."""
    ends = {}
    for name, synchronous, behind in (("", "synchronous", "separate, 2"), ("_reference", "0", "2")):
        figures = json.loads((RESULTS / f"stream_curves{name}_60_lr_0.001.json").read_text())
        assert figures["comparison"] == stream_curves.compare(figures["curves"], synchronous)
        assert figures["lr"] == 1e-3
        ends[name] = [figures["comparison"][kind]["final_accuracy"]["mean"] for kind in (synchronous, behind)]
    text = (ROOT / "docs" / "asynchronous.md").read_text()
    for alone, late in ends.values():
        assert alone > 0.8 > 0.6 > late
        assert f"{alone:.2f}" in text
        assert f"{late:.2f} ± " in text
