"""Prompts for rollouts: `PromptDataModule`."""

from typing import Any

from lightning_megatron_rl.data.base import Overlong, RowDataModule
from lightning_megatron_rl.data.sources import Row, Source, column
from lightning_megatron_rl.data.templates import PromptTemplate, tokenize_segment
from lightning_megatron_rl.sample import Prompt


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
        max_prompt_length: Most tokens of a prompt.
        overlong_prompts: Whether longer prompts are dropped and counted, or an error.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the orders.

    Raises:
        ValueError: in `setup`, for rows that cannot be used and batches that do not divide.

    Example:
        ``PromptDataModule("openai/gsm8k", tokenizer="Qwen/Qwen3-0.6B", batch_size=64, apply_chat_template=True)``
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
        max_prompt_length: int = 1024,
        overlong_prompts: Overlong = "drop",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(train, val, tokenizer, batch_size, val_batch_size, shuffle, seed)
        self.prompt_column = prompt_column
        self.answer_column = answer_column
        self.answer_marker = answer_marker
        self.template = PromptTemplate(apply_chat_template, system_prompt, prompt_template, add_special_tokens)
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts

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
        lengths = [len(prompt.token_ids) for prompt in prompts]
        return self.drop_overlong(
            prompts, lengths, self.max_prompt_length, self.overlong_prompts, dataset, "max_prompt_length"
        )

    def _answer(self, row: Row, where: str) -> str | None:
        if self.answer_column is None:
            return None
        answer = column(row, self.answer_column, f"{where} (answer_column: null if rewards need no answer)")
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
