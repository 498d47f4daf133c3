"""A training script as a user writes it, for every launcher; `python -m tests.strategy.launch_script --help`."""

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.training import Recorder, SequenceDataModule, frozen_sequences


class Dies(pl.Callback):
    """Ends one rank without a word in a step, as the kernel does to one that took too much memory.

    Args:
        rank: Which.
        step: That is not finished.
        died: Written before that; in a run that is started again it dies no more. None: each time.
    """

    def __init__(self, rank: int, step: int, died: Path | None) -> None:
        self.rank = rank
        self.step = step
        self.died = died

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if trainer.global_step != self.step or trainer.global_rank != self.rank:
            return
        if self.died is not None:
            if self.died.exists():
                return
            self.died.touch()
        os._exit(3)


class IsTerminated(pl.Callback):
    """Sends SIGTERM to one rank in its first step, and keeps the step at which each rank then stopped."""

    def __init__(self, rank: int, out: Path) -> None:
        self.rank = rank
        self.out = out

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if index == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        (self.out / f"{trainer.global_rank}.stopped").write_text(f"{type(exception).__name__} {trainer.global_step}")


class IsSlow(pl.Callback):
    """Spends time in each step, and keeps the number of the step that each rank is in."""

    def __init__(self, seconds: float, out: Path) -> None:
        self.seconds = seconds
        self.out = out

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        (self.out / f"{trainer.global_rank}.step").write_text(str(trainer.global_step))
        time.sleep(self.seconds)


class PortIsWanted(LightningEnvironment):
    """Takes the port of the run for itself if nobody has it, whenever the run asks for its number."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.taken: list[socket.socket] = []

    @property
    def main_port(self) -> int:
        port = super().main_port
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taker.bind(("127.0.0.1", port))
            taker.listen()
            self.taken.append(taker)
            outcome = "taken"
        except OSError as error:
            taker.close()
            outcome = str(error.errno)
        with (self.out / f"{self.local_rank()}.attempts").open("a") as file:
            file.write(f"{outcome}\n")
        return port


class RefusedData(SequenceDataModule):
    """A data set that cannot be downloaded, which rank 0 alone tries."""

    def prepare_data(self) -> None:
        raise ValueError("no such data set")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--checkpoints", type=Path, default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--root", type=Path, help="where SLURM's link to a checkpoint is, and looked for")
    parser.add_argument("--strategy", type=json.loads, default=None)
    parser.add_argument("--nodes", type=json.loads, default={})
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--dying-rank", type=int, default=None)
    parser.add_argument("--dying-step", type=int, default=1)
    parser.add_argument("--dies-once", action="store_true")
    parser.add_argument("--terminated-rank", type=int, default=None)
    parser.add_argument("--port-is-wanted", action="store_true")
    parser.add_argument("--refused-data", action="store_true")
    options = parser.parse_args()

    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.parallel.nodes import NodeSettings
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

    recorder = Recorder()
    callbacks: list[pl.Callback] = [recorder]
    if options.dying_rank is not None:
        died = options.out / "died" if options.dies_once else None
        callbacks.append(Dies(options.dying_rank, options.dying_step, died))
    if options.terminated_rank is not None:
        callbacks.append(IsTerminated(options.terminated_rank, options.out))
    if options.checkpoints is not None:
        saved = ModelCheckpoint(options.checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks.append(saved)
        saved.save_last = True
    if options.step_s:
        callbacks.append(IsSlow(options.step_s, options.out))
    wanted = MegatronStrategy(cluster_environment=PortIsWanted(options.out)) if options.port_is_wanted else None
    if options.strategy is not None:
        wanted = MegatronStrategy(**options.strategy, nodes=NodeSettings(**options.nodes))
    trainer = pl.Trainer(
        strategy=wanted or "megatron",
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=options.steps,
        default_root_dir=options.root,
        logger=False,
        enable_checkpointing=options.checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,  # `SequenceDataModule` shards by itself
    )
    (options.out / f"{trainer.global_rank}.pid").write_text(str(os.getpid()))
    module = SFTModule(
        options.model,
        train=TrainingSettings(
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.01, adam_eps=1e-3), max_tokens_per_microbatch=64
        ),
    )
    data = RefusedData if options.refused_data else SequenceDataModule
    trainer.fit(module, data(frozen_sequences(options.rows), 4), ckpt_path="last" if options.resume else None)
    steps = [{name: step[name] for name in ("policy/loss", "policy/grad_norm")} for step in recorder.steps]
    (options.out / f"{trainer.global_rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
