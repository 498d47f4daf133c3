"""Prompts for rollouts: `PromptDataModule`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from lightning.pytorch.utilities import rank_zero_only

from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.sources import Row, Source, column, describe_source
from lightning_megatron_rl.data.templates import PromptTemplate, tokenize_segment
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

OnLongPrompt = Literal["refuse", "drop", "truncate_left"]


class PromptDataModule(RowDataModule[Prompt]):
    """Prompts with their reference answers, tokenised once; a batch is a `list[Prompt]`.

    Batch sizes count all data-parallel ranks; of `batch_size` prompts each rank gets an equal share.
    Training resumes with exactly the next batch, also in the middle of a shuffled epoch.

    Args:
        train: Training rows: a `.jsonl` or `.parquet` file, a directory or hub name for `datasets.load_dataset`, the
            dotted path of a callable; or `{path, split, name, limit}`; or a class with `init_args`.
        tokenizer: Directory or hub name with the tokenizer of the model.
        val: Validation sets by name, each like `train`; `test` and `predict` run on them too.
        batch_size: Prompts per rollout, over all ranks.
        val_batch_size: Prompts per validation batch, over all ranks; as many as `batch_size` if unset.
        prompt_column: Column with the prompt, text or a list of chat messages; if unset `prompt`, else `question`.
        answer_column: Column with the reference answer; null if rewards need none.
        answer_marker: Of an answer whose last line holds this marker only what follows is kept, as in GSM8K's
            "… #### 72"; other answers stay whole. Null keeps all whole.
        apply_chat_template: Put text prompts into a user message of the tokenizer's chat template.
        system_prompt: Text of a system message; needs the chat template.
        prompt_template: Text around a text prompt; `{prompt}` stands for it.
        add_special_tokens: Whether prompts without chat template get the tokenizer's special tokens, like BOS.
        max_prompt_length: Most tokens of a prompt; unset: what fits beside the response into the engine's
            `max_model_len`, which is checked in any case.
        on_long_prompt: What becomes of a longer prompt: "refuse" ends the run before anything is loaded, "drop" leaves
            the row out, "truncate_left" keeps the prompt's last tokens. Both of these are counted in a warning.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the orders. Unset it is the run's (`seed_everything`); a resumed run keeps that of its checkpoint.
        chat_template_kwargs: Variables of the tokenizer's chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: in `setup`, for rows that cannot be used and batches that do not divide.
    """

    def __init__(
        self,
        train: Source,
        tokenizer: str,
        val: dict[str, Source] | None = None,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = "answer",
        answer_marker: str | None = "####",
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        add_special_tokens: bool = True,
        max_prompt_length: int | None = None,
        on_long_prompt: OnLongPrompt = "refuse",
        shuffle: bool = True,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(train, val, tokenizer, batch_size, val_batch_size, shuffle, seed)
        self.prompt_column = prompt_column
        self.answer_column = answer_column
        self.answer_marker = answer_marker
        self.template = PromptTemplate(
            apply_chat_template, system_prompt, prompt_template, add_special_tokens, chat_template_kwargs or {}
        )
        check_ranges({"max_prompt_length": COUNT}, locals(), "data.")
        if on_long_prompt not in get_args(OnLongPrompt):
            raise ValueError(f"on_long_prompt={on_long_prompt!r}: choose one of {', '.join(get_args(OnLongPrompt))}")
        self.max_prompt_length = max_prompt_length
        self.on_long_prompt = on_long_prompt
        self._encoded: dict[str, tuple[list[Prompt], int]] = {}  # and how many were dropped or cut, by data set
        self._long: dict[str, int] = {}  # prompts that the engine's limit drops or cuts

    def encode(self, rows: list[Row], dataset: str, source_name: str) -> list[Prompt]:
        """One `Prompt` per row whose prompt is not too long; `index` is the row's number in the source."""
        prompt_column = self.prompt_column
        if prompt_column is None:
            prompt_column = "question" if "question" in rows[0] and "prompt" not in rows[0] else "prompt"
        prompts = []
        for index, row in enumerate(rows):
            where = f"{dataset} row {index} of {source_name}"
            segment = self.template.prompt_segment(self.tokenizer, column(row, prompt_column, where), where)
            token_ids = tokenize_segment(self.tokenizer, segment)
            if not token_ids:
                raise ValueError(f"{where}: the prompt {segment.text!r} has no tokens")
            prompts.append(
                Prompt(
                    token_ids=token_ids,
                    text=segment.text,
                    answer=self._answer(row, where),
                    index=index,
                    dataset=dataset,
                    columns={key: row[key] for key in row if key not in (prompt_column, self.answer_column)},
                )
            )
        count = 0
        if self.max_prompt_length is not None:
            rule = f"more than max_prompt_length={self.max_prompt_length} tokens"
            prompts, count = self._shortened(prompts, self.max_prompt_length, rule, dataset)
        self._encoded[dataset] = prompts, count
        return prompts

    @property
    def long_prompts(self) -> dict[str, int]:
        """Prompts that `on_long_prompt` dropped or cut, by data set."""
        return {name: count + self._long.get(name, 0) for name, (_, count) in self._encoded.items()}

    def fit_into_engine(self, max_model_len: int, response: Mapping[str, int], vocab_size: int) -> None:
        """Hold all prompts to what an engine can sample from, before it starts; called again, with its limits alone.

        Args:
            max_model_len: Longest prompt and response together. # [tokens]
            response: Most tokens of a response, by data set.
            vocab_size: Token ids of the model are below it.

        Raises:
            ValueError: A prompt is too long and `on_long_prompt` is "refuse", or too few are left; responses that leave
                no room to any prompt; a token id that the model does not have.
        """
        for dataset, (whole, _) in self._encoded.items():
            for prompt in whole:
                if max(prompt.token_ids) >= vocab_size:
                    raise ValueError(
                        f"{self._name(prompt)} has the token id {max(prompt.token_ids)}, the model's vocabulary ends at"
                        f" {vocab_size - 1}: data.tokenizer={self.tokenizer_name!r} is not the tokenizer of this model"
                    )
            room = max_model_len - response[dataset]
            if room < 1:
                raise ValueError(
                    f"responses to {dataset} may have {response[dataset]} tokens, engine.max_model_len is"
                    f" {max_model_len}: {max_model_len} - {response[dataset]} = {room} tokens are left to a prompt."
                    " Lower their max_tokens, or raise engine.max_model_len"
                )
            rule = (
                f"prompt + response ({response[dataset]} tokens) > engine.max_model_len ({max_model_len}), which leaves"
                f" {room} tokens to a prompt"
            )
            self._sets[dataset], self._long[dataset] = self._shortened(whole, room, rule, dataset)
        if "train" in self._sets:
            self.check_batches(self._sets["train"])

    def _shortened(self, prompts: list[Prompt], limit: int, rule: str, dataset: str) -> tuple[list[Prompt], int]:
        """The prompts of at most `limit` tokens, what `on_long_prompt` makes of the others, and how many these are."""
        long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
        if not long:
            return prompts, 0
        count = f"{len(long)} of {len(prompts)} prompts of {dataset}"
        longest = max(len(prompt.token_ids) for prompt in long)
        if self.on_long_prompt == "refuse":
            raise ValueError(
                f"{self._name(long[0])} has {len(long[0].token_ids)} tokens: {rule}. {count} are too long, the longest"
                f" has {longest} tokens. Raise the limit, lower max_tokens, or set data.on_long_prompt to drop or"
                " truncate_left"
            )
        if self.on_long_prompt == "drop" and len(long) == len(prompts):
            shortest = min(len(prompt.token_ids) for prompt in long)
            raise ValueError(f"all {len(prompts)} prompts of {dataset} are too long (shortest: {shortest}): {rule}")
        done = "dropped" if self.on_long_prompt == "drop" else "cut at their beginning"
        rank_zero_only(tell_loss)(f"{count} were {done}: {rule} (the longest has {longest})")
        if self.on_long_prompt == "drop":
            return [prompt for prompt in prompts if len(prompt.token_ids) <= limit], len(long)
        cut = [prompt if len(prompt.token_ids) <= limit else self._cut(prompt, limit) for prompt in prompts]
        return cut, len(long)

    def _cut(self, prompt: Prompt, limit: int) -> Prompt:
        token_ids = prompt.token_ids[-limit:]
        return replace(prompt, token_ids=token_ids, text=str(self.tokenizer.decode(token_ids)))

    def _name(self, prompt: Prompt) -> str:
        source = self.train_source if prompt.dataset == "train" else self.val_sources[prompt.dataset]
        return f"{prompt.dataset} row {prompt.index} of {describe_source(source)}"

    def _answer(self, row: Row, where: str) -> str | None:
        if self.answer_column is None:
            return None
        answer = column(row, self.answer_column, f"{where} (answer_column: null if rewards need no answer)")
        is_nan = isinstance(answer, float) and math.isnan(answer)
        if is_nan or isinstance(answer, list | dict | bytes):  # the text of these in Python is no answer
            raise ValueError(
                f"{where}: the answer in {self.answer_column!r} is {answer!r} ({type(answer).__name__}), not text or a"
                " number: name another answer_column, or set it to null and read sample.prompt.columns in a reward of"
                " your own"
            )
        return None if answer is None else extract_answer(answer, self.answer_marker)


def extract_answer(answer: Any, marker: str | None) -> str:
    """The reference answer as text: what follows `marker` on the last line, or all of it if the marker is not there.

    Example:
        ``extract_answer("48 / 2 = 24\\n#### 24", "####")`` is ``"24"``; ``extract_answer(0.5, "####")`` is ``"0.5"``.
    """
    text = str(answer)
    last_line = text.rstrip().rpartition("\n")[2]
    if marker is None or marker not in last_line:
        return text
    return last_line.rpartition(marker)[2].strip()
