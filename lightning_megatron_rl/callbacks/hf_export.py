"""`HFExport`: the trained policy as a Hugging Face directory, proved by loading it back."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.peft_files import merge_adapter
from lightning_megatron_rl.strategy.distributed import check_writable, run_on_rank_zero

# Largest difference of a log-prob between the trainer and the export loaded by Transformers in fp32. In fp32 both sides
# compute the same function (2e-6 is usual; 1e-3 leaves room for long sums on large models). In bf16 the trainer's
# activations carry 8 bits: single log-probs differ by some 0.1; a wrong, missing or permuted tensor by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
_PROBE_SEQUENCES, _PROBE_TOKENS = 2, 32


class HFExport(Callback):
    """Write the policy in Hugging Face format at the end of training, and every n steps if asked.

    Each export holds weights, config, tokenizer and generation config. Before it is reported as done, Transformers
    loads it and its log-probs of a probe (of a reward model: its scores) are compared with the trainer's. Adapters
    (LoRA) are merged into the weights, or written alone in PEFT's format into ``<export>-adapter``.

    Args:
        dirpath: Directory of the exports: ``<dirpath>/step-000100`` while training, ``<dirpath>/last`` at the end.
        every_n_steps: Export every so many steps as well.
        at_end: Export when training ends.
        verify: Load each export back and compare.
        overwrite: Replace an export that is there already instead of refusing to start.
        adapter: "merged" writes the whole model, "peft" the adapters alone, "both" both.

    Example:
        ``Trainer(callbacks=[HFExport(dirpath="runs/grpo/hf")])``
    """

    def __init__(
        self,
        dirpath: str,
        every_n_steps: int | None = None,
        at_end: bool = True,
        verify: bool = True,
        overwrite: bool = False,
        adapter: Literal["merged", "peft", "both"] = "merged",
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: at least 1, or None for the end only.")
        self.dirpath = Path(dirpath)
        self.every_n_steps = every_n_steps
        self.at_end = at_end
        self.verify = verify
        self.overwrite = overwrite
        self.adapter = adapter

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Check before training that the exports can be written at its end.

        Raises:
            OSError: The directory cannot be written.
            ValueError: It holds an export already and `overwrite` is off, or there are no adapters to export.
        """
        if stage != "fit":
            return
        if self.adapter != "merged" and pl_module.lora is None:
            raise ValueError(
                f"HFExport(adapter={self.adapter!r}): the model has no adapters. Set the module's lora, or leave"
                " adapter='merged', which writes the weights of any model."
            )
        check_writable(self.dirpath, "HFExport(dirpath)")

        def check() -> None:
            for directory in self._directories(self._last):
                if not self.overwrite and directory.exists():
                    raise ValueError(
                        f"HFExport(dirpath={str(self.dirpath)!r}): {directory} exists already. Choose another dirpath,"
                        " move the export away, or set overwrite=True."
                    )

        run_on_rank_zero(check)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Export every n steps."""
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.export(pl_module, self.dirpath / f"step-{trainer.global_step:06d}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Export at the end."""
        if self.at_end:
            self.export(pl_module, self._last)

    @property
    def _last(self) -> Path:
        return self.dirpath / "last"

    def _directories(self, model: Path) -> list[Path]:
        adapter = model.with_name(f"{model.name}-adapter")
        return {"merged": [model], "peft": [adapter], "both": [model, adapter]}[self.adapter]

    def export(self, pl_module: Any, directory: Path) -> None:
        """Write and verify one export; a collective of all ranks.

        Raises:
            RuntimeError: Loaded back, it does not compute what the trainer computes; it is renamed to ``*.failed``.
        """
        with pl_module.phase("hf_export"):
            probe = _probe(pl_module.hf_model.config.vocab_size)
            expected = pl_module.export_outputs(probe) if self.verify else []
            for target in self._directories(directory):
                if self.overwrite:
                    run_on_rank_zero(partial(shutil.rmtree, target, ignore_errors=True))
                base = None  # of an adapter
                if target == directory:
                    pl_module.save_pretrained(target)
                else:
                    base = pl_module.hf_model.path
                    pl_module.save_adapter(target)
                if self.verify:
                    tolerance = _TOLERANCE[pl_module.strategy.precision_plugin.params_dtype]
                    compute = _scores if pl_module.exports_classifier else _logprobs
                    load = partial(compute, target, temperature=pl_module.temperature, base=base)
                    error = run_on_rank_zero(partial(_verify, target, probe, expected, load, tolerance))
                    what = "scores" if pl_module.exports_classifier else "log-probs"
                    rank_zero_info(f"exported to {target}; loaded back, {what} differ by at most {error:.1e}")


def _probe(vocab_size: int) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(_PROBE_TOKENS, dtype=torch.bool)
    mask[0] = False
    return [
        TokenSequence(torch.randint(vocab_size, (_PROBE_TOKENS,), generator=generator), mask, {})
        for _ in range(_PROBE_SEQUENCES)
    ]


@torch.no_grad()
def _verify(
    directory: Path,
    probe: list[TokenSequence],
    expected: list[Tensor],
    load: Callable[[Tensor], Tensor],
    tolerance: float,
) -> float:
    tokens = torch.stack([sequence.token_ids for sequence in probe])
    error = (load(tokens) - torch.stack(expected)).abs().max().item()
    if not error <= tolerance:
        failed = directory.with_name(f"{directory.name}.failed")
        shutil.rmtree(failed, ignore_errors=True)
        directory.rename(failed)
        raise RuntimeError(
            f"the export {failed} is not the trained model: loaded back by Transformers, an output differs by"
            f" {error:.3g} > {tolerance}. Training state is in the checkpoint; please report this with"
            " the model's config."
        )
    return error


def _logprobs(directory: Path, tokens: Tensor, *, temperature: float, base: Path | None) -> Tensor:
    """Log-probs of `tokens` [b, s] under an export, or an adapter on its `base`, [b, s - 1]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(base or directory)
    model = AutoModelForCausalLM.from_pretrained(base or directory, dtype=torch.float32).eval()
    if base is not None:
        merge_adapter(model, directory)
    logprobs = (model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[..., 0]


def _scores(directory: Path, tokens: Tensor, *, temperature: float, base: Path | None) -> Tensor:
    """Scores of `tokens` [b, s] under an exported reward model, [b, 1]; there is no temperature, and no adapter."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    return torch.stack([model(row[None]).logits[0] for row in tokens])  # one by one: no padding token is needed
