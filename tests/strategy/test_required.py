"""Callbacks under a strategy that is not Megatron's: one error, whichever comes first."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.prediction_files import PredictionFiles
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.timeline import Timeline
from lightning_megatron_rl.callbacks.weight_average import WeightAverage

CALLBACKS: dict[str, tuple[str, Callable[[str], pl.Callback]]] = {
    "HFExport": ("fit", HFExport),
    "PredictionFiles": ("predict", PredictionFiles),
    "RolloutSamples": ("fit", lambda path: RolloutSamples(dirpath=path)),
    "Timeline": ("fit", Timeline),
    "WeightAverage": ("fit", lambda _: WeightAverage()),
}


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_name_the_strategy_that_they_need(tmp_path, name, strategy):
    stage, make = CALLBACKS[name]
    callback = make(str(tmp_path / "output"))
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, callbacks=[callback])
    with pytest.raises(TypeError, match=rf"^{name} runs on MegatronStrategy, the Trainer has \w+: use Trainer\("):
        callback.setup(trainer, pl.LightningModule(), stage)
    assert list(tmp_path.iterdir()) == []
