"""`TrainingSettings`: its ranges, and what becomes of arguments that were modules' own."""

import inspect
from dataclasses import replace

import pytest
from torch.optim import AdamW

from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reward_model import RewardModule
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import MOVED, TrainingSettings

MODULES = (SFTModule, DPOModule, RewardModule, GRPOModule, PPOModule)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_moved_argument_is_refused_with_its_new_place(module):
    for name in MOVED:
        with pytest.raises(TypeError, match=rf"^{module.__name__}: `{name}` is now `train\.{name}`\."):
            module("nothing", **{name: None})


def test_other_unknown_arguments_are_python_s():
    with pytest.raises(TypeError, match="unexpected keyword argument 'packin'"):
        SFTModule("nothing", packin=True)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rewards'"):
        GRPOModule("nothing")


def test_second_argument_is_no_optimizer():
    with pytest.raises(TypeError, match=r"^SFTModule: train is to be TrainingSettings\(\.\.\.\), not a dict\."):
        SFTModule("nothing", {"lr": 1e-3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe": {"aux_loss_coeff": 0.1}}, r"^train: moe is to be MoESettings\(\.\.\.\), not a dict\."),
        ({"lora": {"rank": 4}}, r"^train: lora is to be LoRASettings"),
        ({"optimizer": {"lr": 1e-3}}, r"^train: optimizer is to be OptimizerConfig\(\.\.\.\), not a dict\."),
        ({"optimizer": AdamW}, r"^train: optimizer is the class AdamW itself"),
    ],
    ids=str,
)
def test_settings_of_another_class_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        TrainingSettings(**options)


def test_subclass_may_have_an_argument_of_that_name():
    class Own(SFTModule):
        def __init__(self, model: str, packing: str) -> None:
            super().__init__(model)
            self.own_packing = packing

    assert Own("nothing", packing="dense").own_packing == "dense"
    assert "train" in inspect.signature(SFTModule).parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, r"^train\.max_tokens_per_microbatch=0 must be at least 1"),
        ({"logprob_chunk_size": 0.5}, r"^train\.logprob_chunk_size=0\.5 must be a whole number"),
        ({"verify_model": "maybe"}, "verify_model='maybe' is none of"),
        (
            {"max_tokens_per_microbatch": "much"},
            r"^train\.max_tokens_per_microbatch='much' must be .* or .auto",
        ),
        ({"recompute": "some"}, r"^train\.recompute='some': choose one of none, full, auto, or a number of layers"),
        ({"lr_scheduler": "cosine"}, r"^train\.lr_scheduler='cosine' cannot be called with the optimizer"),
        ({"recompute": 0}, r"^train\.recompute=0: choose one of none"),
        ({"recompute": True}, r"^train\.recompute=True: choose one of none"),
        (
            {"recompute": 2, "model_config": {"recompute_granularity": "selective"}},
            r"^train\.recompute=2 with train\.model_config=.*leave one of them out",
        ),
        (
            {"recompute": "auto", "model_config": {"recompute_granularity": "selective"}},
            r"^train\.recompute='auto' with train\.model_config=.*leave one of them out",
        ),
        (
            {"recompute": "full", "model_config": {"recompute_granularity": "selective"}},
            r"^train\.recompute='full' with train\.model_config=.*leave one of them out",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**options)


def test_setting_that_a_reward_model_has_no_use_for_warns():
    with pytest.warns(UserWarning, match="logprob_chunk_size=64 does nothing"):
        RewardModule("nothing", train=TrainingSettings(logprob_chunk_size=64))


def test_full_recompute_is_megatron_s_three_fields():
    settings = TrainingSettings(recompute="full", model_config={"layernorm_epsilon": 1e-5})
    assert settings.recomputed(12) == 1
    assert settings.model_config == {
        "layernorm_epsilon": 1e-5,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert replace(settings, packing=False).model_config == settings.model_config  # given twice
    assert TrainingSettings().recomputed(12) == 0


def test_some_layers_are_recomputed():
    settings = TrainingSettings(recompute=3)
    assert settings.model_config == {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    }
    assert replace(settings, packing=False).model_config == settings.model_config
    assert settings.recomputed(12) == 0.25
    assert settings.recomputed(2) == 1  # all that a stage has
    assert TrainingSettings(model_config={"recompute_granularity": "selective"}).recomputed(12) == 0
    for incomplete in ({}, {"recompute_method": "block"}):
        fields = {"recompute_granularity": "full", **incomplete}
        assert TrainingSettings(model_config=fields).recomputed(12) == 1


def test_what_is_open_is_settled_and_nothing_else():
    both = TrainingSettings(max_tokens_per_microbatch="auto", recompute="auto")
    assert both.is_open
    assert both.token_budget == 8192
    chosen = both.settle(512, recompute=3)
    assert (chosen.token_budget, chosen.recompute, chosen.is_open) == (512, 3, False)
    tokens = TrainingSettings(max_tokens_per_microbatch="auto").settle(512, recompute="full")
    assert (tokens.token_budget, tokens.recompute) == (512, "none")
    assert TrainingSettings(recompute="auto").settle(512, recompute="full").token_budget == 8192
