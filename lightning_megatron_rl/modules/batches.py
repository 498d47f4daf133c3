"""What a module refuses by name before anything is made of it: batches, rows and tokenizers that do not fit it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.models.hf.files import has_tokenizer
from lightning_megatron_rl.modules.sharing import microbatch_rules
from lightning_megatron_rl.sample import Prompt, Sample

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule


def check_batch(module: object, batch: Any, item: type, maker: type[RowDataModule]) -> None:
    """Refuse a batch that is no list of `item`.

    Args:
        module: Whose step gets it.
        batch: Of a DataLoader.
        item: What the step works on.
        maker: The data module that makes those.

    Raises:
        TypeError: With what came, and what gives the right batches.
    """
    if isinstance(batch, list | tuple):
        found = {type(one).__name__ for one in batch if not isinstance(one, item)}
        if not found:
            return
        what = f"{type(batch).__name__} of {', '.join(sorted(found))}"
    else:
        what = type(batch).__name__
    raise TypeError(
        f"batches of {type(module).__name__} are lists of {item.__name__}, which {maker.__name__} makes; got a {what}."
        f" Give trainer.fit(...) a {maker.__name__}, or a DataLoader over {item.__name__}s with collate_fn=list."
    )


def check_prompts(module: object, prompts: Any) -> None:
    """Refuse a batch that is no list of prompts, or whose prompts would be sampled with the same noise.

    One prompt that is there twice, as a loader that draws with replacement may give it, is warned about once.

    Raises:
        TypeError: As in `check_batch`.
        ValueError: Two different prompts of a dataset have one index.
    """
    check_batch(module, prompts, Prompt, PromptDataModule)
    known: dict[tuple[str, int], Prompt] = {}
    for prompt in prompts:
        other = known.setdefault((prompt.dataset, prompt.index), prompt)
        if other.token_ids != prompt.token_ids:
            raise ValueError(
                f"two prompts of a batch have index {prompt.index} of {prompt.dataset!r}: {other.text[:40]!r} and"
                f" {prompt.text[:40]!r}. Seeds are made of it, so that both would be sampled with the same noise. Give"
                " each Prompt(index=...) its row's number."
            )
    if len(known) < len(prompts):
        rank_zero_warn(  # without the prompt's number: these words are said once
            "a batch has one prompt more than once: seeds are made of its index, so that each time it gets the same"
            " responses. Draw prompts without replacement; num_generations is how many responses a prompt gets."
        )


def check_samples(module: object, samples: list[Sample]) -> None:
    """Refuse to train on no response at all, where other replicas may have some.

    Raises:
        ValueError: With whose batch it is.
    """
    if not samples:
        raise ValueError(
            f"{type(module).__name__} has no response to train on: this replica's batch of prompts is empty. Each"
            " data-parallel replica needs a prompt in every training batch: let the DataLoader drop a last batch that"
            " is not full, or use a PromptDataModule."
        )


def check_rows[Item](
    module: "ModelModule", item: type[Item], sequences_of: Callable[[Item], Iterable[TokenSequence]]
) -> None:
    """Refuse rows of a data module that no micro-batch has room for, or that are not of the model's vocabulary.

    Args:
        module: Set up, so that model and budget are known.
        item: What the data module's rows are; others are refused with their batch.
        sequences_of: The sequences that are run of a row.

    Raises:
        ValueError: With the row, the arithmetic and the remedy.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, RowDataModule):
        return
    settings = module.train_settings
    rules, budget = microbatch_rules(module.strategy.layout, fp8=settings.is_fp8), settings.token_budget
    limit, vocab_size = budget // rules.row_multiple * rules.row_multiple, module.hf_model.config.vocab_size
    rows = [row for rows in data.items.values() for row in rows if isinstance(row, item)]
    long: list[TokenSequence] = []
    for sequence in (sequence for row in rows for sequence in sequences_of(row)):
        if (largest := int(sequence.token_ids.max())) >= vocab_size:
            raise ValueError(
                f"{sequence.origin} has the token id {largest}, the model's vocabulary ends at {vocab_size - 1}:"
                f" data.tokenizer={data.tokenizer_name!r} is not the tokenizer of this model"
            )
        if rules.place(len(sequence)) > limit:
            long.append(sequence)
    if long:
        longest = max(len(sequence) for sequence in long)
        raise ValueError(
            f"{long[0].origin} has {len(long[0])} tokens, which is more than train.max_tokens_per_microbatch={budget}"
            f" holds ({len(long)} sequences are too long, the longest has {longest}): raise it to at least"
            f" {-(-longest // rules.row_multiple) * rules.row_multiple}, or lower data.max_length"
        )


def check_tokenizer(module: "ModelModule") -> None:
    """Refuse data that another tokenizer than the model's has encoded; warn of another template or end of a sequence.

    Args:
        module: Whose model is known.

    Raises:
        ValueError: The vocabularies differ: with the first difference, and the remedy.
    """
    data, model = module.trainer.datamodule, module.hf_model  # type: ignore[attr-defined]
    if not isinstance(data, RowDataModule) or data.tokenizer_name in (module.model_path, str(model.path)):
        return
    if not has_tokenizer(model.path):
        return  # whoever decodes samples asks for one
    given, own = data.tokenizer, model.tokenizer
    theirs, ours = given.get_vocab(), own.get_vocab()
    if theirs != ours:
        token, _ = min(theirs.items() ^ ours.items(), key=lambda item: (item[1], item[0]))
        found, there = (f"id {vocabulary[token]}" if token in vocabulary else "no id" for vocabulary in (theirs, ours))
        raise ValueError(
            f"data.tokenizer={data.tokenizer_name!r} has another vocabulary than the model {module.model_path!r}:"
            f" {len(theirs)} tokens, there {len(ours)}; {token!r} has {found}, there {there}. The model would be"
            " trained on other text than the data's, and an export has its own tokenizer. Set data.tokenizer to the"
            " model, or save the tokenizer into its directory (save_pretrained)"
        )
    pairs = {"chat_template": (given.chat_template, own.chat_template), "eos_token": (given.eos_token, own.eos_token)}
    if differ := [name for name, (there, here) in pairs.items() if there != here]:
        rank_zero_warn(
            f"data.tokenizer={data.tokenizer_name!r} has another {' and '.join(differ)} than the model"
            f" {module.model_path!r}: the data has that, while samplers and exports have the model's own. Save the"
            " tokenizer into the model's directory (save_pretrained) if they are to be the same"
        )
