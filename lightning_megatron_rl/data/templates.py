"""Templates: rows to text by a plain or a chat template, and text to token ids, segment by segment."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.models.hf.continuing import continuing_ids
from lightning_megatron_rl.models.hf.files import tokenizer_source
from lightning_megatron_rl.utilities.remote_code import remedy, trusts_remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # Transformers' own, around assistant turns
# what Transformers and the data module hand to a template, and the functions that it may call
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range", "dict"}


@dataclass
class Segment:
    """A piece of text that is tokenised by itself, so that its borders always fall between two tokens."""

    text: str
    is_target: bool = False  # its tokens are trained on
    add_special_tokens: bool = False  # the tokenizer's own, like BOS; chat templates write theirs into the text
    append_eos: bool = False  # it ends with the end-of-sequence token


@dataclass
class PromptTemplate:
    """How prompts become text.

    Args:
        apply_chat_template: Put text prompts into a user message of the tokenizer's chat template. Prompts that are
            lists of messages always go through it.
        system_prompt: Text of a system message put first; needs the chat template.
        prompt_template: Text around a prompt that is text; `{prompt}` stands for it, other braces for themselves.
        add_special_tokens: Whether prompts without chat template get the tokenizer's special tokens, like BOS.
        chat_template_kwargs: Variables of the tokenizer's chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: if a setting would have no effect.

    Example:
        ``PromptTemplate(prompt_template="Q: {prompt} A:")`` turns ``1+1`` into ``Q: 1+1 A:``.
    """

    apply_chat_template: bool = False
    system_prompt: str | None = None
    prompt_template: str = "{prompt}"
    add_special_tokens: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template={self.prompt_template!r} does not contain {{prompt}}: all prompts would be equal"
            )

    def messages(self, prompt: Any, where: str) -> list[Message] | None:
        """The prompt as chat messages, or None if it is plain text.

        Raises:
            ValueError: if the prompt is neither text nor a list of messages, or does not fit the settings.
        """
        if isinstance(prompt, str):
            if not self.apply_chat_template:
                if self.system_prompt is not None:
                    raise ValueError("system_prompt needs apply_chat_template=True, or put it into prompt_template")
                if self.chat_template_kwargs:
                    raise ValueError(
                        f"{where}: chat_template_kwargs={dict(self.chat_template_kwargs)} need"
                        " apply_chat_template=True: the prompt is text and goes through no chat template"
                    )
                return None
            messages = [{"role": "user", "content": self.fill(prompt)}]
        else:
            messages = check_messages(prompt, where)
            if self.prompt_template != "{prompt}":
                raise ValueError(
                    f"{where}: prompt_template={self.prompt_template!r} is for text, but this prompt is a list of "
                    f"messages: leave it at its default"
                )
            if messages[-1]["role"] == "assistant":
                raise ValueError(f"{where}: the prompt ends with an assistant message, so nothing is left to answer")
        return self.with_system_prompt(messages, where)

    def with_system_prompt(self, messages: list[Message], where: str) -> list[Message]:
        """The messages after the system message, if there is one.

        Raises:
            ValueError: if the messages begin with a system message already.
        """
        if self.system_prompt is None:
            return messages
        if messages and messages[0]["role"] == "system":
            raise ValueError(f"{where}: the messages have a system message of their own; leave system_prompt unset")
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def fill(self, prompt: str) -> str:
        """The prompt inside `prompt_template`."""
        return self.prompt_template.replace("{prompt}", prompt)

    def prompt_segment(self, tokenizer: "PreTrainedTokenizerBase", prompt: Any, where: str) -> Segment:
        """The text of a prompt up to where the response begins."""
        messages = self.messages(prompt, where)
        if messages is None:
            return Segment(self.fill(prompt), add_special_tokens=self.add_special_tokens)
        options = self.chat_template_kwargs
        return Segment(render_chat(tokenizer, messages, where, add_generation_prompt=True, options=options))


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a hub name or directory.

    Raises:
        ValueError: if there is none.
    """
    from transformers import AutoTokenizer

    source = tokenizer_source(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusts_remote_code())
    except Exception as error:  # of many kinds, for files that say something else than their format asks
        raise ValueError(
            f"no tokenizer could be loaded from {name_or_path!r}: {type(error).__name__}: {error}{remedy(error)}. Give"
            " the directory or hub name of a model; a relative path that is not there is looked up as a hub name"
        ) from error


def check_messages(messages: Any, where: str) -> list[Message]:
    """The messages, known to be a non-empty list of dicts with text as `role` and `content`.

    Fields that are None are left out: tables give every message the fields of all, such as `tool_calls`, and templates
    ask whether a field is there.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{where}: {messages!r} ({type(messages).__name__}) is neither text nor a non-empty list of chat messages"
        )
    for number, message in enumerate(messages):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            raise ValueError(f"{where}: message {number} is {message!r}, not a dict with text as 'role' and 'content'")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    where: str,
    *,
    add_generation_prompt: bool = False,
    options: Mapping[str, Any] = _NO_OPTIONS,
) -> str:
    """The text that the tokenizer's chat template makes of messages.

    Raises:
        ValueError: if there is no chat template, it refuses the messages or fails on them, or it does not read one of
            the `options`.
    """
    from jinja2.exceptions import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where}: the tokenizer {tokenizer.name_or_path!r} has no chat template: use text prompts with "
            f"apply_chat_template=False, or a tokenizer of an instruction-tuned model"
        )
    check_chat_options(tokenizer, options)
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"{where}: the chat template refuses messages with roles {roles}: {error}") from error
    except Exception as error:  # of the template's code, for fields that are not as it takes them
        fields = sorted({key for message in messages for key in message})
        raise ValueError(
            f"{where}: the chat template fails on messages with the fields {fields}: {type(error).__name__}: {error}"
        ) from error


def check_chat_options(tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]) -> None:
    """Refuse variables that the tokenizer's chat template does not read: they would change nothing.

    Raises:
        ValueError: With those that it reads.
    """
    if not options:
        return
    readable = sorted(template_variables(tokenizer.get_chat_template()) - _GIVEN - set(tokenizer.special_tokens_map))
    for name in options:
        if name in readable:
            continue
        if name in _GIVEN:
            raise ValueError(f"chat_template_kwargs: {name} is set by the data module: leave it out")
        near = difflib.get_close_matches(name, readable, n=1)
        known = f"did you mean {near[0]}?" if near else f"it reads {', '.join(readable) or 'none but the messages'}"
        raise ValueError(
            f"chat_template_kwargs: the chat template of {tokenizer.name_or_path!r} does not read {name}; {known}"
        )


@cache
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads and does not set itself."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template))))


def conversation_segments(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    where: str,
    *,
    first_target: int = 0,
    options: Mapping[str, Any] = _NO_OPTIONS,
) -> list[Segment]:
    """A conversation cut at the borders of its assistant turns, which are the targets.

    A turn's target is what the template adds to the conversation before it, generation prompt included: exactly what
    a model has to generate, with the template's end of turn. Messages after the last target are left out.

    Args:
        tokenizer: Has the chat template.
        messages: The conversation.
        where: The row, for errors.
        first_target: Index of the first message that may be a target.
        options: Variables of the template.

    Raises:
        ValueError: if the template rewrites earlier turns once later ones follow, so that no such cut exists, if there
            is no assistant turn, or one with nothing before it.

    Example:
        User "Hi", assistant "Yo" in ChatML: a segment ``<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n``
        and a target ``Yo<|im_end|>\\n``.
    """
    segments: list[Segment] = []
    done = ""
    for end in range(first_target, len(messages)):
        if messages[end]["role"] != "assistant":
            continue
        if end == 0:
            raise ValueError(
                f"{where}: the conversation begins with an assistant message, and nothing is there that it answers: put"
                " a user or system message before it (system_prompt does for all rows), or leave the row out"
            )
        before = render_chat(tokenizer, messages[:end], where, add_generation_prompt=True, options=options)
        after = render_chat(tokenizer, messages[: end + 1], where, add_generation_prompt=False, options=options)
        if not after.startswith(before):
            _check_opening(before, after, render_chat(tokenizer, messages[:end], where, options=options), where, end)
        if not (before.startswith(done) and after.startswith(before)):
            raise ValueError(
                f"{where}: the chat template changes earlier text when message {end} (assistant) is added, so its "
                f"tokens cannot be told apart: split the conversation into rows that end with one assistant turn "
                f"each, or use prompt and completion columns"
            )
        segments += [Segment(before[len(done) :]), Segment(after[len(before) :], is_target=True)]
        done = after
    if not segments:
        raise ValueError(f"{where}: no assistant message to train on")
    return segments


def _check_opening(before: str, after: str, history: str, where: str, number: int) -> None:
    """Refuse an answer that alone is the reason why `after` does not begin with `before`: the history is as it was."""
    if after.startswith(history) and before.startswith(history):
        opening, answer = before[len(history) :], after[len(history) :]
        raise ValueError(
            f"{where}: the chat template lets an answer begin with {opening!r}, message {number} (assistant) begins"
            f" with {answer[: len(opening) + 20]!r}: put what is missing, such as a thought, into the message, or give"
            " chat_template_kwargs with which the template does not ask for it"
        )


def tokenize_segment(tokenizer: "PreTrainedTokenizerBase", segment: Segment, before: str = "") -> list[int]:
    """Token ids of one segment, which follows the text `before`; empty: it begins a sequence.

    Raises:
        ValueError: if it ends with an end-of-sequence token and the tokenizer has none.
    """
    ids: list[int]
    if before:
        ids = continuing_ids(tokenizer, segment.text, before)
    else:
        ids = tokenizer(segment.text, add_special_tokens=segment.add_special_tokens)["input_ids"]
        if segment.add_special_tokens and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            plain: list[int] = tokenizer(segment.text, add_special_tokens=False)["input_ids"]
            # some tokenizers end every text, but this one goes on
            ids = ids if ids[-len(plain) :] == plain else ids[:-1]
    if not segment.append_eos:
        return ids
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token. Set append_eos=False")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
