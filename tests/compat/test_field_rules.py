"""The one check of settings that do something on some devices only."""

from dataclasses import dataclass, field

import pytest
import torch

from lightning_megatron_rl.compat.field_rules import Rule, check_settings, dataclass_defaults

RULES = {
    "on_gpu": Rule("cuda", "use a GPU"),
    "fused": Rule("transformer_engine", "it is a kernel", speed_only=True),
    "graph_*": Rule("never", "remove it"),
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def check(given, device=CPU, transformer_engine=False):
    defaults = {"graph_impl": "none"}
    return check_settings("owner", given, defaults, RULES, device=device, transformer_engine=transformer_engine)


def test_refused_with_value_reason_and_remedy():
    with pytest.raises(ValueError, match=r"owner: on_gpu=3 does nothing on 'cpu', it needs CUDA: use a GPU\."):
        check({"on_gpu": 3})
    for device, transformer_engine in ((CPU, False), (CUDA, True)):
        with pytest.raises(ValueError, match=r"owner: graph_scope='all' does nothing here: remove it\."):
            check({"graph_scope": "all"}, device, transformer_engine)


def test_speed_only_is_dropped_with_a_warning():
    with pytest.warns(UserWarning, match=r"owner: fused=True does nothing with torch layers .*It is left out"):
        assert check({"fused": True, "other": 1}, CUDA) == {"other": 1}


def test_what_works_here_or_asks_for_nothing_is_kept():
    given = {"on_gpu": 3, "fused": True}
    assert check(given, CUDA, transformer_engine=True) == given
    given = {"on_gpu": None, "fused": False, "graph_impl": "none", "unknown": object()}
    assert check(given) == given


def test_defaults_of_a_dataclass():
    @dataclass
    class Config:
        required: int
        plain: int = 2
        made: list[int] = field(default_factory=list)

    assert dataclass_defaults(Config) == {"required": None, "plain": 2, "made": []}
