"""Passes over a share as routers see them; tests/modules/test_moe.py runs them on models with experts."""

from typing import Any

import pytest

from lightning_megatron_rl.modules.routing import routed_pass

NONE: Any = None  # a dense model has no routers, and looks at neither share nor sums


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_routing_of_a_dense_model_is_refused(mode):
    with (
        pytest.raises(ValueError, match=rf"routing='{mode}', but this model is dense"),
        routed_pass(None, NONE, mode, NONE),
    ):
        pass


def test_a_dense_model_has_nothing_to_record():
    with routed_pass(None, NONE, "free", NONE) as recorded:
        assert recorded == []
    assert recorded == []
