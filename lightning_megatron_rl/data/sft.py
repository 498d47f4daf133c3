"""Token sequences for supervised fine-tuning: `SFTDataModule`."""

from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.loader import GlobalBatches, TokenBudgetBatches
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.sources import Row, Source, column
from lightning_megatron_rl.data.templates import (
    PromptTemplate,
    Segment,
    check_messages,
    conversation_segments,
    tokenize_segment,
)
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges, check_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFTOverlong = Literal["drop", "truncate", "error"]


class SFTDataModule(RowDataModule[TokenSequence]):
    """Sequences with a response-only loss mask, tokenised once; a batch is a `list[TokenSequence]`.

    Rows hold a prompt and a completion or, with `messages_column`, a conversation whose assistant turns are targets.
    Prompt and response are tokenised apart, as in generation, where the response's tokens follow the prompt's.

    Args:
        train: Training rows: a `.jsonl` or `.parquet` file, a directory or hub name for `datasets.load_dataset`, the
            dotted path of a callable; or `{path, split, name, limit}`; or a class with `init_args`.
        tokenizer: Directory or hub name with the tokenizer of the model.
        val: Validation sets by name, each like `train`; `test` and `predict` run on them too.
        batch_size: Sequences per optimizer step, over all ranks; with `max_tokens_per_batch`, at most so many.
        max_tokens_per_batch: Tokens per optimizer step, over all ranks, at most: batches then differ in their number of
            sequences, and none is left out at an epoch's end.
        val_batch_size: Sequences per validation batch, over all ranks; as many as `batch_size` if unset.
        prompt_column: Column with the prompt, text or a list of chat messages.
        completion_column: Column with the completion, text.
        messages_column: Column with whole conversations, instead of prompt and completion.
        apply_chat_template: Put a text prompt and its completion into the tokenizer's chat template.
        system_prompt: Text of a system message; needs the chat template.
        prompt_template: Text around a text prompt; `{prompt}` stands for it.
        add_special_tokens: Whether prompts without chat template get the tokenizer's special tokens, like BOS.
        append_eos: Whether completions without chat template end with the end-of-sequence token, as a target. Chat
            templates end their turns themselves.
        max_length: Most tokens of a sequence.
        overlong: Whether longer sequences are dropped and counted, cut at their end, or an error.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the orders. Unset it is the run's (`seed_everything`); a resumed run keeps that of its checkpoint.
        chat_template_kwargs: Variables of the tokenizer's chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: in `setup`, for rows that cannot be used and batches that do not divide.

    Example:
        ``SFTDataModule("sums.jsonl", tokenizer="model", completion_column="answer", batch_size=128)``
        ``SFTDataModule("chats", tokenizer="model", messages_column="messages", max_tokens_per_batch=2**19)``
    """

    def __init__(
        self,
        train: Source,
        tokenizer: str,
        val: dict[str, Source] | None = None,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        messages_column: str | None = None,
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        add_special_tokens: bool = True,
        append_eos: bool = True,
        max_length: int = 2048,
        overlong: SFTOverlong = "drop",
        shuffle: bool = True,
        seed: int | None = None,
        max_tokens_per_batch: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(train, val, tokenizer, batch_size, val_batch_size, shuffle, seed)
        check_ranges({"max_length": COUNT, "max_tokens_per_batch": COUNT}, locals(), "data.")
        check_words({"overlong": SFTOverlong}, locals(), "data.")
        self.max_tokens_per_batch = max_tokens_per_batch
        self.prompt_column = prompt_column
        self.completion_column = completion_column
        self.messages_column = messages_column
        self.template = PromptTemplate(
            apply_chat_template, system_prompt, prompt_template, add_special_tokens, chat_template_kwargs or {}
        )
        if messages_column is not None and prompt_template != "{prompt}":
            raise ValueError(
                f"prompt_template={prompt_template!r} is for text prompts, and messages_column={messages_column!r} "
                f"holds conversations: leave one of them at its default"
            )
        self.append_eos = append_eos
        self.max_length = max_length
        self.overlong = overlong

    def encode(self, rows: list[Row], dataset: str, source_name: str) -> list[TokenSequence]:
        """One `TokenSequence` per row that is not left out for its length."""
        sequences, lengths = [], []
        for index, row in enumerate(rows):
            where = f"{dataset} row {index} of {source_name}"
            sequence = self._sequence(row, where)
            length = len(sequence)
            if self.overlong == "truncate" and length > self.max_length:
                cut = slice(self.max_length)
                # a row whose targets are all cut off keeps its length, and is dropped with the overlong ones
                if sequence.loss_mask[cut].any():
                    sequence = TokenSequence(sequence.token_ids[cut], sequence.loss_mask[cut], origin=where)
                    length = self.max_length
            sequences.append(sequence)
            lengths.append(length)
        mode: Literal["drop", "error"] = "error" if self.overlong == "error" else "drop"
        names = [sequence.origin for sequence in sequences]
        return self.drop_overlong(sequences, names, lengths, self.max_length, mode, dataset, "max_length")

    def training_batches(
        self, items: list[TokenSequence], num_replicas: int, rank: int, shuffle: bool
    ) -> GlobalBatches:
        """Batches of `batch_size` sequences, or of `max_tokens_per_batch` tokens."""
        if self.max_tokens_per_batch is None:
            return super().training_batches(items, num_replicas, rank, shuffle)
        return TokenBudgetBatches(
            [len(sequence) for sequence in items],
            self.max_tokens_per_batch,
            self.batch_size,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=self.order_seed,
        )

    def check_batches(self, items: list[TokenSequence]) -> None:
        """Any number of sequences makes batches of a token budget, if each of them fits."""
        if self.max_tokens_per_batch is None:
            super().check_batches(items)
        else:
            self.training_batches(items, num_replicas=1, rank=0, shuffle=False)

    def _sequence(self, row: Row, where: str) -> TokenSequence:
        return segments_to_sequence(self.tokenizer, self._segments(row, where), where)

    def _segments(self, row: Row, where: str) -> list[Segment]:
        if self.messages_column is not None:
            messages = check_messages(column(row, self.messages_column, where), where)
            whole = self.template.with_system_prompt(messages, where)
            options = self.template.chat_template_kwargs
            return conversation_segments(self.tokenizer, whole, where, options=options)
        prompt = column(row, self.prompt_column, where)
        completion = column(row, self.completion_column, where)
        if not isinstance(completion, str):
            raise ValueError(f"{where}: the completion is {completion!r} ({type(completion).__name__}), not text")
        return completion_segments(self.tokenizer, self.template, prompt, completion, where, append_eos=self.append_eos)


def completion_segments(
    tokenizer: "PreTrainedTokenizerBase",
    template: PromptTemplate,
    prompt: Any,
    completion: str,
    where: str,
    *,
    append_eos: bool,
) -> list[Segment]:
    """A prompt, text or messages, and its completion, which is the target.

    Args:
        tokenizer: Has the chat template, if one is needed.
        template: How prompts become text.
        prompt: Text or a list of chat messages.
        completion: Text.
        where: The row, for errors.
        append_eos: Whether a completion without chat template ends with the end-of-sequence token.

    Raises:
        ValueError: if the prompt cannot be used.
    """
    prompt_messages = template.messages(prompt, where)
    if prompt_messages is not None:
        messages = [*prompt_messages, {"role": "assistant", "content": completion}]
        options = template.chat_template_kwargs
        return conversation_segments(tokenizer, messages, where, first_target=len(prompt_messages), options=options)
    return [
        template.prompt_segment(tokenizer, prompt, where),
        Segment(completion, is_target=True, append_eos=append_eos),
    ]


def segments_to_sequence(tokenizer: "PreTrainedTokenizerBase", segments: list[Segment], where: str) -> TokenSequence:
    """The segments' tokens end to end, those of targets in the loss mask.

    Raises:
        ValueError: if there is no target token, or nothing before the first one.
    """
    token_ids: list[int] = []
    is_target: list[bool] = []
    before = ""
    for segment in segments:
        ids = tokenize_segment(tokenizer, segment, before)
        before = segment.text or before
        token_ids += ids
        is_target += [segment.is_target] * len(ids)
    if not any(is_target):
        raise ValueError(f"{where}: no token to train on: the response is empty")
    if is_target[0]:
        raise ValueError(f"{where}: the prompt has no tokens, so nothing predicts the first token of the response")
    return TokenSequence(torch.tensor(token_ids), torch.tensor(is_target), origin=where)
