"""`HFExport`: writes the trained policy as a Hugging Face directory and checks it by reading it back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from lightning_megatron_rl.callbacks.model_card import describe_run, write_card
from lightning_megatron_rl.callbacks.weight_average import AVERAGE, WeightAverage
from lightning_megatron_rl.checkpoints.directories import UnfinishedDirectory, remove_unfinished, replace
from lightning_megatron_rl.checkpoints.resuming import resumes
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.hf.files import FailedEverywhereError, num_weights
from lightning_megatron_rl.models.hf.peft_files import merge_adapter
from lightning_megatron_rl.models.hf.writer import check_space
from lightning_megatron_rl.parallel.distributed import run_on_rank_zero
from lightning_megatron_rl.strategy.products import asks_for_tf32
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.files import check_writable, fsync
from lightning_megatron_rl.utilities.notices import tell_failure, tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, check_ranges, check_words
from lightning_megatron_rl.utilities.remote_code import trusts_remote_code
from lightning_megatron_rl.utilities.text_files import user_path

# Largest difference of a log-prob between the trainer and the export loaded by Transformers in fp32. In fp32 both sides
# compute the same function (2e-6 is usual, 7e-6 was seen on a GPU; long sums of large models get the rest). With 8 bits
# of mantissa (bf16) single log-probs differ by some 0.1, with 10 (fp16, TF32) by a quarter of that; a wrong, missing or
# permuted tensor by far more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.125}
_TF32_TOLERANCE = 0.125
_PROBE_SEQUENCES, _PROBE_TOKENS = 2, 32
_Adapter = Literal["merged", "peft", "both"]
_OnError = Literal["fail", "warn", "raise"]
_RANGES = {
    "every_n_steps": COUNT.called("leave it out to export at the end only"),
    "max_shard_size_gb": POSITIVE.called("it is a size in 10^9 bytes"),
}


class HFExport(Callback):
    """Write the policy in Hugging Face format at the end of training, and every n steps if asked.

    Each export holds weights, config, tokenizer, chat template, generation config and a model card with the run's
    provenance. It gets its final name after a check: every tensor on disk equals the trainer's bit by bit, and
    Transformers computes the trainer's log-probs of a probe (of a reward model: its scores). An export that fails the
    check stays as ``<export>.failed``. A resumed run replaces exports of steps that it repeats. Adapters (LoRA) are
    merged into the weights, or written alone in PEFT's format into ``<export>-adapter``. Under ``fast_dev_run`` nothing
    is exported: the model of one batch would be in the way of the run's, or take its place.

    Args:
        dirpath: Directory of the exports: ``<dirpath>/step-000100`` while training, ``<dirpath>/last`` at the end.
        every_n_steps: Export every so many steps as well.
        at_end: Export when training ends.
        verify: Read each export back and compare.
        overwrite: Replace an export that is there already instead of refusing to start, in a run that was not resumed
            too. The old one stays until the new one is checked.
        adapter: "merged" writes the whole model, "peft" the adapters alone, "both" both.
        max_shard_size_gb: Largest file of weights, in 10^9 bytes.
        average: Export the average that a `WeightAverage` callback before this one keeps, in place of the weights
            themselves; before its first update these, with a warning.
        on_error: What an export that fails does to the run: with "fail" it goes on, saves, and ends in an error that
            lists the failures (exit code 1); "warn" only logs a warning; "raise" stops the run at once.
    """

    def __init__(
        self,
        dirpath: str,
        every_n_steps: int | None = None,
        at_end: bool = True,
        verify: bool = True,
        overwrite: bool = False,
        adapter: _Adapter = "merged",
        max_shard_size_gb: float = 5.0,
        on_error: _OnError = "fail",
        average: bool = False,
    ) -> None:
        check_ranges(_RANGES, locals(), "HFExport.")
        check_words({"adapter": _Adapter, "on_error": _OnError}, locals(), "HFExport.")
        self.dirpath = user_path(dirpath)
        self.every_n_steps = every_n_steps
        self.at_end = at_end
        self.verify = verify
        self.overwrite = overwrite
        self.adapter = adapter
        self.max_shard_size = int(max_shard_size_gb * 1e9)
        self.on_error = on_error
        self.average = average
        self.failures: list[str] = []
        self._source = Path()  # what the run's model is read from, if that is a directory
        self._resumed = False
        self._exports = True

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Check before the model is built that the exports can be written.

        Raises:
            OSError: The directory cannot be written.
            TypeError: The strategy is none of Megatron's.
            ValueError: There are no adapters, or no average, to export, or a reward model's adapters; or an export is
                there already, the run is not resumed, and `overwrite` is off; or one would replace the run's own model.
        """
        if stage != "fit":
            return
        require_megatron(trainer, self)
        self.failures = []
        self._exports = not trainer.fast_dev_run  # type: ignore[attr-defined]
        if not self._exports:
            rank_zero_info("HFExport exports nothing under fast_dev_run.")
            return
        if self.adapter != "merged" and pl_module.train_settings.lora is None:
            raise ValueError(
                f"HFExport(adapter={self.adapter!r}): the model has no adapters. Set the module's lora, or leave"
                " adapter='merged', which writes the weights of any model."
            )
        if self.adapter != "merged" and pl_module.exports_classifier:
            raise ValueError(
                f"HFExport(adapter={self.adapter!r}) with {type(pl_module).__name__}: PEFT's format would leave out the"
                " head, which is trained as well. Set adapter='merged'."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)]
        if self.average and not any(isinstance(callback, WeightAverage) for callback in before):
            what = "keeps no average"
            if any(isinstance(callback, WeightAverage) for callback in callbacks):
                what = "updates its average after this callback: exports would be one update behind"
            raise ValueError(
                f"HFExport(average=True): the run {what}. List WeightAverage(decay=...) among the Trainer's callbacks,"
                " before HFExport, or leave average out."
            )
        run_on_rank_zero(partial(check_writable, self.dirpath, "HFExport(dirpath)"))
        run_on_rank_zero(partial(remove_unfinished, self.dirpath))
        self._source = user_path(pl_module.model_path).resolve()
        # unknown counts as resumed until it is known
        self._resumed = resumes(trainer) is not False or trainer.global_step > 0
        run_on_rank_zero(partial(self._check_names, trainer.max_steps))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Check that there is room for one export.

        Raises:
            OSError: There is not, with the arithmetic.
        """
        if self._exports:
            run_on_rank_zero(partial(self._check_space, pl_module))

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Look again for existing exports: it is known now whether the run was resumed.

        Raises:
            ValueError: There is one, the run was not resumed, and `overwrite` is off.
        """
        self._resumed = trainer.ckpt_path is not None or trainer.global_step > 0
        if self._exports:
            run_on_rank_zero(partial(self._check_names, trainer.max_steps))

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Do the same where there was no sanity check.

        Raises:
            ValueError: As there.
        """
        self.on_sanity_check_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Export every n steps."""
        if self._exports and self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self.export(pl_module, self._at(trainer.global_step))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Export at the end."""
        if self._exports and self.at_end:
            self.export(pl_module, self._last)

    @property
    def _last(self) -> Path:
        return self.dirpath / "last"

    def _at(self, step: int) -> Path:
        return self.dirpath / f"step-{step:06d}"

    def _directories(self, model: Path) -> list[Path]:
        adapter = model.with_name(f"{model.name}-adapter")
        return {"merged": [model], "peft": [adapter], "both": [model, adapter]}[self.adapter]

    def _check_names(self, max_steps: int) -> None:
        """Refuse to begin if an export has the name of one that this run would write; on rank 0."""
        if self.at_end:
            for directory in self._directories(self._last):
                self._check_name(directory)
        for directory in sorted(self.dirpath.glob("step-*")):
            number = directory.name.removeprefix("step-").removesuffix("-adapter")
            if not self.every_n_steps or not number.isdecimal() or int(number) % self.every_n_steps:
                continue
            if (int(number) <= max_steps or max_steps < 0) and directory in self._directories(self._at(int(number))):
                self._check_name(directory)

    def _check_name(self, target: Path) -> None:
        if target.resolve() == self._source:
            raise ValueError(
                f"HFExport(dirpath={str(self.dirpath)!r}): an export would replace {target}, the model that this run"
                " trains: a resumed run would take the export for what it began with, and adapters would have lost what"
                " they were trained on. Choose another dirpath."
            )
        if target.exists() and not (self.overwrite or self._resumed):
            raise ValueError(
                f"HFExport(dirpath={str(self.dirpath)!r}): {target} exists already, and this run was not resumed from a"
                " checkpoint. Choose another dirpath, move the export away or remove it, or set overwrite=True."
            )

    def _check_space(self, pl_module: Any) -> None:
        if self.adapter == "peft":  # megabytes
            return
        dtype = pl_module.hf_model.dtype
        count = num_weights(pl_module.hf_model.path)
        check_space(self.dirpath, count * dtype.itemsize, f"{count:,} weights of {dtype.itemsize} bytes")

    def export(self, pl_module: Any, directory: Path) -> None:
        """Write and verify one export; a collective of all ranks.

        Raises:
            ValueError: It failed, and `on_error` is "raise".
        """
        average = pl_module.strategy.averages[AVERAGE] if self.average else None
        if average is not None and average.count == 0:
            rank_zero_only(tell_loss)(
                f"HFExport(average=True): {directory} has the weights themselves, for the average has had no update by"
                f" step {pl_module.trainer.global_step}. Lower WeightAverage(update_starting_at_step=...)."
            )
            average = None
        with pl_module.phase("hf_export"), nullcontext() if average is None else average.in_place():
            probe = _probe(pl_module.hf_model.config.vocab_size)
            expected = pl_module.export_outputs(probe) if self.verify else []
            for target in self._directories(directory):
                try:
                    self._write(pl_module, target, probe, expected, is_adapter=target != directory)
                except FailedEverywhereError as error:
                    if self.on_error == "raise":
                        raise
                    self.failures.append(str(error))
                    message = (
                        f"HFExport FAILED, training goes on: {error} The weights are in the run's checkpoints:"
                        " `lightning-megatron-rl convert CHECKPOINT DIRECTORY` exports them."
                    )
                    if self.on_error == "fail":  # on every rank, so that every one ends with it
                        tell_failure(message, aloud=pl_module.global_rank == 0)
                    else:
                        rank_zero_only(tell_loss)(message)

    def _write(
        self, pl_module: Any, target: Path, probe: list[TokenSequence], expected: list[Tensor], *, is_adapter: bool
    ) -> None:
        """Write a directory under another name, check it, and rename it."""
        with self._unfinished(pl_module, target) as staging:
            if is_adapter:
                pl_module.save_adapter(staging)
            else:
                pl_module.save_pretrained(staging, self.max_shard_size)
            try:
                proof = self._prove(pl_module, staging, probe, expected, is_adapter) if self.verify else "not verified"
            except FailedEverywhereError as error:
                failed = _everywhere(partial(_set_aside, target, staging))
                raise FailedEverywhereError(f"the export {failed} {error}") from error
            facts = describe_run(pl_module, proof)

            def finish() -> None:
                write_card(staging, facts, adapter=is_adapter)
                for path in [*staging.rglob("*"), staging]:
                    fsync(path)
                self._check_name(target)  # it may have come meanwhile
                replace(staging, target)
                fsync(target.parent)

            _everywhere(finish)
        rank_zero_info(f"exported to {target}: {proof}")

    @contextmanager
    def _unfinished(self, pl_module: Any, target: Path) -> Iterator[Path]:
        """A locked directory of rank 0 that an export is written to; it is removed afterwards in any case.

        Raises:
            FailedEverywhereError: What failed inside; the message names the export.
        """
        directories: list[UnfinishedDirectory] = []

        def prepare() -> Path:
            self._check_name(target)
            directories.append(UnfinishedDirectory(target, reserve=False))
            self._check_space(pl_module)
            return directories[0].path / target.name

        staging = None
        try:
            staging = _everywhere(prepare)
            yield staging
        except FailedEverywhereError as error:
            told = str(error) if staging is None else str(error).replace(str(staging), str(target))
            raise FailedEverywhereError(
                told if str(target) in told else f"the export {target} failed: {told}"
            ) from error
        finally:
            for directory in directories:
                directory.abandon()

    def _prove(
        self, pl_module: Any, staging: Path, probe: list[TokenSequence], expected: list[Tensor], is_adapter: bool
    ) -> str:
        """Compare tensors and outputs; return what was found.

        Raises:
            FailedEverywhereError: They differ from the trainer's, or could not be compared.
        """
        differences = (pl_module.adapter_differences if is_adapter else pl_module.export_differences)(staging)
        if differences:
            first = "; ".join(differences[:3])
            raise FailedEverywhereError(
                f"is not the trained model: {len(differences)} tensors on disk are not the trainer's ({first}). The"
                " disk may be at fault; training state is in the checkpoints."
            )
        strategy = pl_module.strategy
        params_dtype = strategy.precision_plugin.params_dtype
        is_tf32 = params_dtype == torch.float32 and strategy.root_device.type == "cuda" and asks_for_tf32()
        # weights are rounded to the model's dtype on disk, which 32-true on a bf16 model does not compute in
        tolerance = max(_TF32_TOLERANCE if is_tf32 else _TOLERANCE[params_dtype], _TOLERANCE[pl_module.hf_model.dtype])
        tolerance /= min(1.0, pl_module.temperature)  # logits are divided by it, and so is what they differ by
        what = "scores" if pl_module.exports_classifier else "log-probs"
        load = partial(
            _scores if pl_module.exports_classifier else _logprobs,
            temperature=pl_module.temperature,
            base=pl_module.hf_model.path if is_adapter else None,
        )
        error = _everywhere(partial(_check_outputs, staging, probe, expected, load, tolerance), "could not be proved: ")
        return f"every tensor is the trainer's; loaded by Transformers, {what} differ by at most {error:.1e}"


def _everywhere[T](function: Callable[[], T], before: str = "") -> T:
    """Call `function` on rank 0 and return its result on all ranks.

    Args:
        function: What rank 0 does.
        before: Beginning of the message for other kinds of errors.

    Raises:
        FailedEverywhereError: On all of them, what it raised on rank 0.
    """

    def attempt() -> tuple[T | None, str | None]:
        try:
            return function(), None
        except FailedEverywhereError as error:
            return None, str(error)
        except Exception as error:
            return None, f"{before}{type(error).__name__}: {error}"

    result, error = run_on_rank_zero(attempt)
    if error is not None:
        raise FailedEverywhereError(error)
    return result  # type: ignore[return-value]


def _probe(vocab_size: int) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(_PROBE_TOKENS, dtype=torch.bool)
    mask[0] = False
    return [
        TokenSequence(torch.randint(vocab_size, (_PROBE_TOKENS,), generator=generator), mask, {})
        for _ in range(_PROBE_SEQUENCES)
    ]


@torch.no_grad()
def _check_outputs(
    staging: Path,
    probe: list[TokenSequence],
    expected: list[Tensor],
    load: Callable[[Path, Tensor], Tensor],
    tolerance: float,
) -> float:
    tokens = torch.stack([sequence.token_ids for sequence in probe])
    error = (load(staging, tokens) - torch.stack(expected)).abs().max().item()
    if not error <= tolerance:
        raise FailedEverywhereError(
            f"is not the trained model: loaded back by Transformers, an output differs by {error:.3g} > {tolerance}."
            " Training state is in the checkpoint; please report this with the model's config."
        )
    return float(error)


def _set_aside(target: Path, staging: Path) -> Path:
    failed = target.with_name(f"{target.name}.failed")
    replace(staging, failed)
    return failed


def _logprobs(directory: Path, tokens: Tensor, *, temperature: float, base: Path | None) -> Tensor:
    """Log-probs of `tokens` [b, s] under an export, or an adapter on its `base`, [b, s - 1]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    trust = trusts_remote_code()
    AutoTokenizer.from_pretrained(base or directory, trust_remote_code=trust)
    found = AutoModelForCausalLM.from_pretrained(base or directory, dtype=torch.float32, trust_remote_code=trust)
    model = found.eval()
    if base is not None:
        merge_adapter(model, directory)
    logprobs = (model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[..., 0]


def _scores(directory: Path, tokens: Tensor, *, temperature: float, base: Path | None) -> Tensor:
    """Scores of `tokens` [b, s] under an exported reward model, [b, 1]; there is no temperature, and no adapter."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    trust = trusts_remote_code()
    AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)
    found = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, trust_remote_code=trust)
    model = found.eval()
    return torch.stack([model(row[None]).logits[0] for row in tokens])  # one by one: no padding token is needed
