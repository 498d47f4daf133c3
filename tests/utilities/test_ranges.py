"""Numbers and words of settings: no public class takes a number without a range, or a word that there is not."""

import importlib
import inspect
import math
import pkgutil
from typing import Any, Literal, get_args, get_origin

import pytest

from examples.environments.grid import GridRows
from examples.environments.guessing import GuessingRows
from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot
from lightning_megatron_rl.callbacks.timeline import Timeline
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.data.preference import PreferenceDataModule
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.data.sources import DataSource
from lightning_megatron_rl.environments.calculator import CalculatorRows
from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reward_model import RewardModule
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.rewards.builtin import math_equal
from lightning_megatron_rl.rewards.guard import GuardedReward
from lightning_megatron_rl.rewards.service import HTTPReward, VLLMRewardModel
from lightning_megatron_rl.rewards.text_rewards import LengthPenalty
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.utilities.ranges import COUNT, PROBABILITY, SHARE, Range, check_ranges, check_words

# what a class needs besides the number under test
NEEDED: dict[type, dict[str, Any]] = {
    DPOModule: {"model": "model"},
    GRPOModule: {"model": "model", "rewards": [math_equal]},
    PPOModule: {"model": "model", "rewards": [math_equal]},
    RewardModule: {"model": "model"},
    SFTModule: {"model": "model"},
    PromptDataModule: {"train": "rows.jsonl", "tokenizer": "model"},
    PreferenceDataModule: {"train": "rows.jsonl", "tokenizer": "model"},
    SFTDataModule: {"train": "rows.jsonl", "tokenizer": "model"},
    DataSource: {"path": "rows.jsonl"},
    ArithmeticRows: {"split": "train", "size": 4},
    CalculatorRows: {"split": "train", "size": 4},
    GridRows: {"size": 4},
    GuessingRows: {"size": 4},
    GuardedReward: {"reward": math_equal},
    HTTPReward: {"url": "http://127.0.0.1:1/score"},
    VLLMRewardModel: {"url": "http://127.0.0.1:1"},
    LengthPenalty: {"free_tokens": 1, "max_tokens": 2},
    HFExport: {"dirpath": "hf"},
    MemorySnapshot: {"directory": "memory"},
    Timeline: {"path": "timeline.json"},
    VLLMServers: {"urls": ["http://node-1:8000"]},
}
FOLDERS = (
    "algorithms", "callbacks", "data", "environments", "models", "modules", "parallel", "rewards", "rollout",
    "strategy",
)  # fmt: skip
# records and machinery that no config names: they are made by the package out of what was checked
INNER = {
    "Action", "AtBatch", "BoundedCalls", "Ending", "GenerationRequest", "GlobalBatches", "GuardedEnvironment",
    "GradientSum", "Lengths", "IPCTransport", "Lending", "LimitedChild", "MicroBatchRules", "ModelModule",
    "NCCLTransport",
    "Offloader", "Origin", "PairModule", "PipelineSplit", "Placement", "PolicyModule", "Progress", "RankTrace", "Reply",
    "Response", "SequenceCost", "ShardedViews", "StreamPlan",
    "Softmax", "SyncReport", "TokenBudgetBatches", "TorchDotProductAttention", "TorchExpertLinear", "TorchNorm",
    "TorchSelfAttention", "Transcript", "UpdateParts", "WorkerProcess", "ArithmeticPairs", "ServiceReward",
    "DaemonPool", "Deliveries", "Delivery", "Flight", "HostFacts", "News", "Place", "Server",
    "MicroBatch", "TokenSequence", "Turn", "BatchCounts", "CheckpointLayout", "Generation", "PushReport",
}  # fmt: skip


def settings() -> list[tuple[type, str, bool]]:
    """Every public class with a parameter that is a number and has a default: class, parameter, whether it is whole."""
    found = []
    for name in (*(f"lightning_megatron_rl.{folder}" for folder in FOLDERS), "examples.environments"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith(("_worker", "_launcher", "_kernels", "_bridge", ".receiver")):
                continue  # scripts that are run by their paths, and what imports vLLM or all of Megatron-Bridge
            for name, cls in vars(importlib.import_module(module.name)).items():
                public = inspect.isclass(cls) and not name.startswith("_") and cls.__module__ == module.name
                if public and name not in INNER:
                    found += [(cls, parameter, whole) for parameter, whole in numbers(cls)]
    return sorted(found, key=lambda setting: (setting[0].__name__, setting[1]))


def numbers(cls: type) -> list[tuple[str, bool]]:
    """Parameters of `cls` with a default that are int or float, alone or beside None; whether they are whole."""
    if issubclass(cls, BaseException):
        return []
    found = []
    for parameter in inspect.signature(cls).parameters.values():
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        is_number = all(kind in (int, float, type(None)) for kind in kinds)
        if is_number and kinds != (type(None),) and parameter.default is not parameter.empty:
            found.append((parameter.name, float not in kinds))
    return found


def test_settings_are_found():
    names = {f"{cls.__name__}.{parameter}" for cls, parameter, _ in settings()}
    assert {"VLLMEngine.max_model_len", "PromptDataModule.batch_size", "MegatronStrategy.timeout_s"} <= names
    assert {"LoRASettings.dropout", "GRPOLossConfig.clip_low", "SandboxLimits.processes"} <= names
    assert len(names) > 90


# any finite number: a reward, a schedule's end, an entropy bonus that may be a penalty, a threshold
SIGNED = {
    "right_above", "final", "entropy_coef", "default", "default_reward", "call_reward", "step_reward",
    "progress_reward", "consistent_reward", "low", "high",
}  # fmt: skip


def test_every_number_of_every_class_has_a_range():
    complaints = []
    for cls, parameter, whole in settings():
        negative = [] if parameter in SIGNED else [-3 if whole else -0.5]
        for value in (math.nan, math.inf, -math.inf, "3", *([-7.5] if whole else []), *negative):
            complaint = "accepted"
            try:
                cls(**{**NEEDED.get(cls, {}), parameter: value})
            except (TypeError, ValueError) as error:
                complaint = "" if f"{parameter}={value!r}" in str(error) else f"refused with {error!r}"
            if complaint:
                complaints.append(f"{cls.__name__}({parameter}={value!r}): {complaint}")
    assert complaints == []


# looked at when a model is built, beside what the machine has
LATER = {"layer_backend"}


def words_of(annotation: Any) -> tuple[Any, ...]:
    """Words of a `Literal`, alone or beside other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for kind in get_args(annotation) for word in words_of(kind))


def test_every_word_of_every_class_is_one_that_there_is():
    """`kl_in="rewards"` trained without the KL, and a reference of the kind "frozen" was the policy itself."""
    complaints, found = [], set()
    for cls in {cls for cls, _, _ in settings()}:
        for name, parameter in inspect.signature(cls).parameters.items():
            words = words_of(parameter.annotation)
            if name in LATER or parameter.default not in words or not isinstance(parameter.default, str):
                continue
            found.add(f"{cls.__name__}.{name}")
            try:
                cls(**{**NEEDED.get(cls, {}), name: "nothing"})
                complaints.append(f"{cls.__name__}({name}='nothing'): accepted")
            except ValueError as error:
                if not all(word in str(error) for word in words):
                    complaints.append(f"{cls.__name__}({name}='nothing'): refused with {error!r}")
    assert complaints == []
    assert {"GRPOLossConfig.kl_in", "ReferenceSettings.kind", "SFTDataModule.overlong"} <= found


@pytest.mark.parametrize(
    ("allowed", "value", "problem"),
    [
        (COUNT, 0, "must be at least 1"),
        (COUNT, 1, None),
        (COUNT, 2.5, "must be a whole number at least 1"),
        (COUNT, True, "must be a number, not a bool"),
        (SHARE, 1.0, None),
        (SHARE, 1.01, "must be in [0, 1]"),
        (PROBABILITY, 1.0, "must be in [0, 1)"),
        (Range(above=0, most=1), 0, "must be in (0, 1]"),
        (Range(below=2), 2, "must be below 2"),
        (Range(most=2), 3, "must be at most 2"),
        (Range(), math.nan, "must be a finite number"),
    ],
)
def test_problem_names_the_range(allowed: Range, value: Any, problem: str | None):
    assert allowed.problem(value) == problem


def test_refusal_of_a_word_names_those_that_there_are():
    check_words({"kind": Literal["a", "b"]}, {"kind": "a"})
    for value in ("c", None, 1):
        with pytest.raises(ValueError, match=rf"^its\.kind={value!r}: choose one of a, b\.$"):
            check_words({"kind": Literal["a", "b"]}, {"kind": value, "other": "c"}, "its.")


def test_refusal_names_setting_value_and_note():
    with pytest.raises(ValueError, match=r"^lora\.rank=0 must be at least 1: rows of A\.$"):
        check_ranges({"rank": COUNT.called("rows of A")}, {"rank": 0, "alpha": -1}, "lora.")
    with pytest.raises(ValueError, match=r"steps=-1 \(in \[3, -1\]\) must be at least 1"):
        check_ranges({"steps": COUNT}, {"steps": [3, -1]})
    check_ranges({"rank": COUNT, "steps": COUNT}, {"rank": None, "steps": [1, 2]})
