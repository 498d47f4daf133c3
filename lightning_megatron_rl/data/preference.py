"""Preference pairs, for reward models and direct preference optimisation: `PreferenceDataModule`."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lightning_megatron_rl.data.base import Overlong, RowDataModule
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.sft import completion_segments, segments_to_sequence
from lightning_megatron_rl.data.sources import Row, Source, column
from lightning_megatron_rl.data.templates import Message, PromptTemplate, check_messages, conversation_segments
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges, check_words


@dataclass
class PreferencePair:
    """Two responses to one prompt, of which the first was preferred; loss masks cover the responses."""

    chosen: TokenSequence
    rejected: TokenSequence

    def __len__(self) -> int:
        """Tokens of the longer side."""
        return max(len(self.chosen), len(self.rejected))


class PreferenceDataModule(RowDataModule[PreferencePair]):
    """Pairs of responses, tokenised once; a batch is a `list[PreferencePair]`.

    Rows hold a prompt, text or chat messages, and two responses as text; or two whole conversations that differ in
    their last turn, which is the assistant's. Pairs whose sides are equal teach nothing: they are dropped and counted.

    Args:
        train: Training rows: a `.jsonl` or `.parquet` file, a directory or hub name for `datasets.load_dataset`, the
            dotted path of a callable; or `{path, split, name, limit}`; or a class with `init_args`.
        tokenizer: Directory or hub name with the tokenizer of the model.
        val: Validation sets by name, each like `train`; `test` and `predict` run on them too.
        batch_size: Pairs per optimizer step, over all ranks.
        val_batch_size: Pairs per validation batch, over all ranks; as many as `batch_size` if unset.
        prompt_column: Column with the prompt; not read where the responses are conversations.
        chosen_column: Column with the preferred response, text or a list of chat messages.
        rejected_column: Column with the other response, of the same kind.
        apply_chat_template: Put a text prompt and its responses into the tokenizer's chat template.
        system_prompt: Text of a system message; needs the chat template.
        prompt_template: Text around a text prompt; `{prompt}` stands for it.
        add_special_tokens: Whether prompts without chat template get the tokenizer's special tokens, like BOS.
        append_eos: Whether responses without chat template end with the end-of-sequence token.
        max_length: Most tokens of a side.
        overlong: Whether pairs with a longer side are dropped and counted, or an error.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the orders. Unset it is the run's (`seed_everything`); a resumed run keeps that of its checkpoint.
        chat_template_kwargs: Variables of the tokenizer's chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: in `setup`, for rows that cannot be used (a missing side among them) and batches that do not divide.

    Example:
        ``PreferenceDataModule("pairs.jsonl", tokenizer="model", batch_size=64)`` with the line
        ``{"prompt": "1+1=", "chosen": "2", "rejected": "3"}``
    """

    def __init__(
        self,
        train: Source,
        tokenizer: str,
        val: dict[str, Source] | None = None,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        add_special_tokens: bool = True,
        append_eos: bool = True,
        max_length: int = 2048,
        overlong: Overlong = "drop",
        shuffle: bool = True,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(train, val, tokenizer, batch_size, val_batch_size, shuffle, seed)
        check_ranges({"max_length": COUNT}, locals(), "data.")
        check_words({"overlong": Overlong}, locals(), "data.")
        self.prompt_column = prompt_column
        self.chosen_column = chosen_column
        self.rejected_column = rejected_column
        self.template = PromptTemplate(
            apply_chat_template, system_prompt, prompt_template, add_special_tokens, chat_template_kwargs or {}
        )
        self.append_eos = append_eos
        self.max_length = max_length
        self.overlong = overlong

    def encode(self, rows: list[Row], dataset: str, source_name: str) -> list[PreferencePair]:
        """One pair per row that is not left out for its length or for equal sides."""
        pairs = [self._pair(row, f"{dataset} row {index} of {source_name}") for index, row in enumerate(rows)]
        told_apart = [pair for pair in pairs if pair.chosen.token_ids.tolist() != pair.rejected.token_ids.tolist()]
        if not told_apart:
            raise ValueError(f"in all {len(pairs)} rows of {dataset} the chosen response equals the rejected one")
        if len(told_apart) < len(pairs):
            rank_zero_only(tell_loss)(
                f"{dataset}: {len(pairs) - len(told_apart)} of {len(pairs)} rows dropped: chosen and rejected are equal"
            )
        lengths = [len(pair) for pair in told_apart]
        names = [pair.chosen.origin for pair in told_apart]
        return self.drop_overlong(told_apart, names, lengths, self.max_length, self.overlong, dataset, "max_length")

    def _pair(self, row: Row, where: str) -> PreferencePair:
        chosen, rejected = (self._side(row, name, where) for name in (self.chosen_column, self.rejected_column))
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise ValueError(
                f"{where}: {self.chosen_column!r} is {type(chosen).__name__}, {self.rejected_column!r} is"
                f" {type(rejected).__name__}: both are text, or both conversations"
            )
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt = column(row, self.prompt_column, where)
            return PreferencePair(self._response(prompt, chosen, where), self._response(prompt, rejected, where))
        if chosen[:-1] != rejected[:-1]:
            raise ValueError(
                f"{where}: the conversations in {self.chosen_column!r} and {self.rejected_column!r} differ before their"
                " last message: they must be two answers to the same prompt"
            )
        return PreferencePair(self._conversation(chosen, where), self._conversation(rejected, where))

    def _side(self, row: Row, name: str, where: str) -> Any:
        """One response: text, or messages that end with the assistant's."""
        side = row.get(name)
        if not side or (isinstance(side, str) and not side.strip()):
            found = f"is {side!r}" if name in row else f"is not there; the row's columns are {sorted(row)}"
            remedy = "" if name in row else "; name the right ones in chosen_column and rejected_column"
            raise ValueError(f"{where}: {name!r} {found}: a preference pair needs both of its sides{remedy}")
        if isinstance(side, str):
            return side
        messages = check_messages(side, where)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise ValueError(
                f"{where}: the conversation in {name!r} has the roles {[message['role'] for message in messages]}: it"
                " must be a prompt and an assistant message at the end"
            )
        return messages

    def _response(self, prompt: Any, response: str, where: str) -> TokenSequence:
        segments = completion_segments(
            self.tokenizer, self.template, prompt, response, where, append_eos=self.append_eos
        )
        return segments_to_sequence(self.tokenizer, segments, where)

    def _conversation(self, messages: list[Message], where: str) -> TokenSequence:
        if self.template.prompt_template != "{prompt}":
            raise ValueError(
                f"{where}: prompt_template={self.template.prompt_template!r} is for text prompts, but the responses are"
                " conversations: leave it at its default"
            )
        whole = self.template.with_system_prompt(messages, where)
        segments = conversation_segments(
            self.tokenizer,
            whole,
            where,
            first_target=len(whole) - 1,
            options=self.template.chat_template_kwargs,
        )
        return segments_to_sequence(self.tokenizer, segments, where)
