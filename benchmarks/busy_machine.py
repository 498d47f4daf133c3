"""A CPU run on a machine that does something else as well: ``python benchmarks/busy_machine.py``.

GRPO steps of the tiny model (8 prompts, 4 samples each) alone, beside one and two endless loops, two runs side by
side, and in a cgroup with a quota of half of the CPUs where the machine allows making one. Once with the settings that
the project chooses ("chosen"), and once with what it would do without them ("every core": as many threads as CPUs,
OpenMP's own waiting). With ``--sizes`` instead: milliseconds per token of larger models with one and with all threads.
With ``--commands`` instead: seconds of a shortened demo and of some tests, with both settings, alone and beside a loop.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import RESULTS, ROOT, StepLog, facts, make_trainer, summary, tiny_grpo, write_json

from lightning_megatron_rl.utilities.cpus import OPENMP_DEFAULTS, usable_cpus

PROMPTS, GENERATIONS, PROMPT_TOKENS = 8, 4, 16
STEPS, WARMUP = 10, 2
LOOP = [sys.executable, "-c", "while True: pass"]
ALONE, ONE, TWO, SIDE, QUOTA = "alone", "beside one busy process", "beside two", "two runs side by side", "quota"
LOOPS = {ALONE: 0, ONE: 1, TWO: 2}
CHOSEN, EVERY_CORE = "chosen", "every core"
LIBGOMPS_OWN = "300000"  # its GOMP_SPINCOUNT where neither that nor OMP_WAIT_POLICY is set
# goal: setting and condition, what it is held to, at most so many times that
GOALS = {
    "alone": ((CHOSEN, ALONE), (EVERY_CORE, ALONE), 1.1),
    "beside one busy process": ((CHOSEN, ONE), (CHOSEN, ALONE), 2.5),
    "two runs side by side": ((CHOSEN, SIDE), (CHOSEN, ALONE), 3.0),
}
SIZES = {  # hidden size, layers, vocabulary
    "1M": (128, 4, 512),
    "7M": (256, 6, 4096),
    "15M": (384, 6, 8192),
    "33M": (512, 8, 8192),
}
COMMANDS = {  # name: arguments of Python
    "tests of vLLM": ["-m", "pytest", "-q", "-n", "0", "tests/rollout/test_vllm.py", "--basetemp", "{out}"],
    "demo, 2 + 1 steps": ["examples/demo/run.py", "--sft-steps", "2", "--grpo-steps", "1", "--out", "{out}"],
}


class Plan(pl.Callback):
    """Takes the run through its conditions: starts and ends the loops beside it, and ends the run in time."""

    def __init__(self, log: StepLog, options: argparse.Namespace) -> None:
        self.taken, self.options = log, options
        self.loops: list[subprocess.Popen[bytes]] = []
        self.conditions = list(options.conditions)
        self.began: list[int] = []  # first step of each condition
        self.deadline = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        done = index - self.began[-1] if self.began else index
        if index < WARMUP or (self.began and done < STEPS and time.monotonic() < self.deadline):
            return
        self.end_loops()
        if len(self.began) == len(self.conditions):
            trainer.should_stop = True
            return
        if not self.began and self.options.meet:
            meet(self.options.meet)
        self.began.append(index)
        count = LOOPS.get(self.conditions[len(self.began) - 1], 0)
        self.loops = [subprocess.Popen(LOOP) for _ in range(count)]
        self.deadline = time.monotonic() + self.options.seconds

    def end_loops(self) -> None:
        for loop in self.loops:
            loop.kill()
            loop.wait()
        self.loops = []

    def on_exception(self, *_: Any) -> None:
        self.end_loops()

    def steps(self) -> Iterator[tuple[str, list[dict[str, float]]]]:
        """Yield each condition and its steps, but the last of all, in which the run was stopped."""
        ends = [*self.began[1:], min(self.began[-1] + STEPS, len(self.taken.steps))]
        for condition, first, end in zip(self.conditions, self.began, ends, strict=True):
            yield condition, self.taken.steps[first:end]


def meet(directory: Path) -> None:
    """Wait until the other run is here."""
    (directory / str(os.getpid())).touch()
    while len(list(directory.iterdir())) < 2:
        time.sleep(0.02)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train through all conditions and return a row for each."""
    log = StepLog(torch.device("cpu"))
    plan = Plan(log, options)
    steps = WARMUP + STEPS * len(options.conditions) + 1
    with tempfile.TemporaryDirectory() as directory:
        module, data = tiny_grpo(
            Path(directory),
            prompts=PROMPTS,
            generations=GENERATIONS,
            prompt_tokens=PROMPT_TOKENS,
            tokens=options.tokens,
            steps=steps,
            ignore_eos=True,
        )
        trainer = make_trainer("cpu", max_steps=steps, callbacks=[log, plan], precision="32-true")
        trainer.fit(module, data)
        threads = {"sampler_threads": module.engine.describe(), "torch_threads": torch.get_num_threads()}
        module.close_engine()
    return [
        {
            "condition": condition,
            **threads,
            "ms_per_token": summary([step["time/rollout_s"] / options.tokens * 1e3 for step in taken]),
            "step_s": summary([step["time/step_s"] for step in taken]),
        }
        for condition, taken in plan.steps()
        if taken
    ]


def start(setting: str, options: argparse.Namespace, *conditions: str, **more: Any) -> subprocess.Popen[str]:
    """Start a run of its own with one of the settings."""
    command = [sys.executable, __file__, "--run", "--tokens", str(options.tokens), "--seconds", str(options.seconds)]
    command += ["--conditions", *conditions, *([] if "meet" not in more else ["--meet", str(more["meet"])])]
    return subprocess.Popen(
        command,
        env=environment_of(setting),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=more.get("before"),
    )


def environment_of(setting: str) -> dict[str, str]:
    """Return what a process of one of the settings is started with."""
    dropped = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", *OPENMP_DEFAULTS)
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if setting == EVERY_CORE:
        environment |= {"OMP_NUM_THREADS": str(usable_cpus().count), "GOMP_SPINCOUNT": LIBGOMPS_OWN}
    else:
        environment |= OPENMP_DEFAULTS  # as the command line does
    return environment | {"PYTHONPATH": str(ROOT)}


def rows_of(setting: str, *runs: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for runs and return their rows."""
    rows: list[dict[str, Any]] = []
    for process in runs:
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a run ended with {process.returncode}:\n{errors[-3000:]}")
        found = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("[")))
        rows += [{"setting": setting, **row} for row in found]
    for row in rows:
        print(
            f"{row['setting']:11s} {row['condition']:24s} ms per token {row['ms_per_token']['median']:7.1f}"
            f" (worst {row['ms_per_token']['max']:.1f}), s per step {row['step_s']['median']:6.2f}"
            f" (worst {row['step_s']['max']:.2f}), {row['step_s']['count']} steps",
            file=sys.stderr,
        )
    return rows


@contextlib.contextmanager
def quota(cpus: float) -> Iterator[Callable[[], None] | None]:
    """Make a cgroup with a quota; yield what puts a process into it, None where none can be made."""
    period = 100_000
    for root, limits in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": int(cpus * period)}),
        (Path("/sys/fs/cgroup"), {"cpu.max": f"{int(cpus * period)} {period}"}),
    ):
        directory = root / f"busy_machine_{os.getpid()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            for name, value in limits.items():
                (directory / name).write_text(str(value))

            def enter(members: Path = directory / "cgroup.procs") -> None:
                members.write_text(str(os.getpid()))

            yield enter
            return
        except FileNotFoundError:  # no controller of CPU time here
            continue
        finally:
            with contextlib.suppress(OSError):
                directory.rmdir()
    yield None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all settings and conditions."""
    rows: list[dict[str, Any]] = []
    for setting in (CHOSEN, EVERY_CORE):
        rows += rows_of(setting, start(setting, options, *LOOPS))
        with tempfile.TemporaryDirectory() as place:
            rows += rows_of(setting, *[start(setting, options, SIDE, meet=place) for _ in range(2)])
    half = usable_cpus().count / 2
    with quota(half) as enter:
        if enter is not None:
            for setting in (CHOSEN, EVERY_CORE):
                rows += rows_of(setting, start(setting, options, QUOTA, before=enter))
    return {
        **facts("cpu"),
        "benchmark": "a CPU run on a busy machine",
        "usable_cpus": usable_cpus().count,
        "quota_cpus": half if any(row["condition"] == QUOTA for row in rows) else None,
        "load_before": options.load,
        "sequences": PROMPTS * GENERATIONS,
        "tokens": options.tokens,
        "rows": rows,
        "goals": [reached(name, rows) for name in GOALS],
    }


def reached(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a goal: the worst of its steps over the worst of those it is held to, for the sampler and the step."""
    mine, other, limit = GOALS[name]

    def worst(place: tuple[str, str], what: str) -> float:
        return max(row[what]["max"] for row in rows if (row["setting"], row["condition"]) == place)

    ratios = {what: worst(mine, what) / worst(other, what) for what in ("ms_per_token", "step_s")}
    return {"goal": name, "limit": limit, **ratios, "ok": max(ratios.values()) <= limit}


def measure_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds per token of models of several sizes, with one thread and with all."""
    from common import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, VLLMEngine

    requests = [
        GenerationRequest([7 + i] * PROMPT_TOKENS, seed=100 * i, num_generations=GENERATIONS) for i in range(PROMPTS)
    ]
    rows = []
    for name, (hidden, layers, vocabulary) in SIZES.items():
        config = Qwen3Config(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32 if hidden < 256 else 64,
            vocab_size=vocabulary,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
        with tempfile.TemporaryDirectory() as directory:
            Qwen3ForCausalLM(config).float().save_pretrained(directory)
            make_tokenizer(vocabulary).save_pretrained(directory)
            for threads in (1, usable_cpus().count):
                engine = VLLMEngine(
                    max_model_len=256, kv_cache_memory_gb=0.25, device="cpu", num_threads=threads, env=OPENMP_DEFAULTS
                )
                engine.start(directory)
                for condition, count in ((ALONE, 0), (ONE, 1)):
                    engine.generate(requests, SamplingParams(max_tokens=4, ignore_eos=True))
                    loops = [subprocess.Popen(LOOP) for _ in range(count)]
                    taken: list[float] = []
                    deadline = time.monotonic() + options.seconds / 4
                    while len(taken) < STEPS and (not taken or time.monotonic() < deadline):
                        began = time.perf_counter()
                        engine.generate(requests, SamplingParams(max_tokens=options.tokens, ignore_eos=True))
                        taken.append((time.perf_counter() - began) / options.tokens * 1e3)
                    for loop in loops:
                        loop.kill()
                        loop.wait()
                    rows.append(
                        {"size": name, "threads": threads, "condition": condition, "ms_per_token": summary(taken)}
                    )
                    print(rows[-1], file=sys.stderr)
                engine.close()
    return {**facts("cpu"), "benchmark": "threads of a sampler by the model's size", "rows": rows}


def measure_commands(names: list[str], path: Path) -> dict[str, Any]:
    """Return seconds of whole commands with both settings, alone and beside a busy process.

    Those of commands that are not measured now stay as they are in the file.
    """
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if row["command"] in COMMANDS and row["command"] not in names]
    for name in names:
        arguments = COMMANDS[name]
        for setting in (CHOSEN, EVERY_CORE):
            for condition in (ALONE, ONE):
                loops = [subprocess.Popen(LOOP) for _ in range(LOOPS[condition])]
                with tempfile.TemporaryDirectory() as out:
                    command = [sys.executable, *(part.format(out=f"{out}/run") for part in arguments)]
                    began = time.monotonic()
                    done = subprocess.run(
                        command, cwd=ROOT, env=environment_of(setting), capture_output=True, text=True
                    )
                    seconds = time.monotonic() - began
                for loop in loops:
                    loop.kill()
                    loop.wait()
                if done.returncode:
                    raise RuntimeError(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
                rows.append({"command": name, "setting": setting, "condition": condition, "seconds": round(seconds, 1)})
                print(rows[-1], file=sys.stderr)
    return {**facts("cpu"), "benchmark": "commands on a busy machine", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    parser.add_argument("--seconds", type=float, default=40.0, help="most of a condition; each has ten steps otherwise")
    parser.add_argument("--sizes", action="store_true", help="measure threads by the model's size instead")
    parser.add_argument(
        "--commands", nargs="*", choices=[*COMMANDS], metavar="NAME", help=f"measure {', '.join(COMMANDS)} instead"
    )
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--conditions", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    if options.run:
        print(json.dumps(run(options)))
        return
    if options.commands is not None:
        name = "busy_machine_commands"
        result = measure_commands(options.commands or [*COMMANDS], options.out or RESULTS / f"{name}.json")
    elif options.sizes:
        name, result = "busy_machine_sizes", measure_sizes(options)
    else:
        name, result = "busy_machine", measure(options)
    write_json(options.out or RESULTS / f"{name}.json", result)
    for goal in result.get("goals", []):
        print(
            f"{goal['goal']}: {goal['ms_per_token']:.2f} (sampler), {goal['step_s']:.2f} (step), goal {goal['limit']}"
        )


if __name__ == "__main__":
    main()
