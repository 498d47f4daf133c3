"""A callback of your own: any Lightning callback; the module's last rollout is there to be read.

With ``PYTHONPATH=examples/extending``::

    lightning-megatron-rl fit --config configs/demo/grpo.yaml --trainer.callbacks+ callback.LongestResponse
"""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class LongestResponse(Callback):
    """Log the longest response of each rollout as ``rollout/longest``. # [tokens]"""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        longest = max(len(sample.response_ids) for sample in pl_module.last_rollout.samples)
        pl_module.log("rollout/longest", float(longest), sync_dist=True, reduce_fx="max")  # over all replicas
