from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron_rl.data import ArithmeticRows, SFTDataModule, TokenSequence, make_microbatches
from tests.notices import told
from tests.tiny_models import make_sentencepiece_tokenizer

TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]
LATE_CHANGE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}(old){% endif %}"
    "{{ message['role'] }}:{{ message['content'] }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def load(rows: list[dict[str, Any]], tokenizer_dir: str, **kwargs: Any) -> list[TokenSequence]:
    """All sequences in order, as batches of one."""
    data = SFTDataModule(lambda: rows, tokenizer_dir, shuffle=False, **{"batch_size": 1, **kwargs})
    data.setup("fit")
    return [sequence for batch in data.train_dataloader() for sequence in batch]


def texts(tokenizer, sequence: TokenSequence) -> tuple[str, str]:
    """The whole text of a sequence, and that of its targets."""
    return tokenizer.decode(sequence.token_ids), tokenizer.decode(sequence.token_ids[sequence.loss_mask])


def test_prompt_and_completion(tokenizer, tokenizer_dir: str):
    rows = [{"prompt": "12+34=", "completion": "46"}]
    (sequence,) = load(rows, tokenizer_dir)
    assert texts(tokenizer, sequence) == ("12+34=46<eos>", "46<eos>")
    assert sequence.token_ids[-1] == tokenizer.eos_token_id
    assert sequence.origin.startswith("train row 0 of ")
    (sequence,) = load(rows, tokenizer_dir, append_eos=False, prompt_template="Q {prompt}")
    assert texts(tokenizer, sequence) == ("Q 12+34=46", "46")
    (sequence,) = load([{"q": "1", "a": "2"}], tokenizer_dir, prompt_column="q", completion_column="a")
    assert texts(tokenizer, sequence) == ("12<eos>", "2<eos>")
    (sequence,) = load([{"prompt": "1", "completion": "2<eos>"}], tokenizer_dir)  # which gets no second one
    assert texts(tokenizer, sequence) == ("12<eos>", "2<eos>")


def test_prompt_and_completion_through_the_chat_template(tokenizer, tokenizer_dir: str):
    whole = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    for prompt in ("1+1=", TALK[:1]):
        (sequence,) = load([{"prompt": prompt, "completion": "2"}], tokenizer_dir, apply_chat_template=True)
        assert texts(tokenizer, sequence) == (whole, "2<|im_end|>\n")
    # answers that are part of the prompt are no targets
    (sequence,) = load([{"prompt": TALK[:3], "completion": "4"}], tokenizer_dir)
    assert texts(tokenizer, sequence)[1] == "4<|im_end|>\n"


def test_all_assistant_turns_of_a_conversation_are_targets_and_nothing_else(tokenizer, tokenizer_dir: str):
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    (sequence,) = load([{"messages": TALK}], tokenizer_dir, messages_column="messages")
    assert texts(tokenizer, sequence) == (whole, "2<|im_end|>\n4<|im_end|>\n")
    assert sequence.token_ids.tolist() == tokenizer(whole)["input_ids"]
    # a question at the end is not answered: nothing of it is needed
    (sequence,) = load([{"messages": TALK[:3]}], tokenizer_dir, messages_column="messages", system_prompt="Add.")
    assert texts(tokenizer, sequence)[0].startswith("<|im_start|>system\nAdd.<|im_end|>\n")
    assert texts(tokenizer, sequence)[0].endswith("2<|im_end|>\n")


def test_border_between_prompt_and_response_never_falls_into_a_token(tmp_path: Path, tokenizer):
    """With merges "1=" + "2" and "12=" tokenise differently; a model generates after the prompt's own tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "1": 1, "=": 2, "2": 3, "=2": 4}
    backend = Tokenizer(models.BPE(vocabulary, [("=", "2")]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "removed")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    (sequence,) = load([{"prompt": "1=", "completion": "2"}], str(tmp_path))
    assert sequence.token_ids.tolist() == [1, 2, 3, 0]  # not [1, 4, 0], which has no prompt "1=" in it
    assert sequence.loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_response_does_not_begin_with_a_space_that_the_tokenizer_puts_before_texts(tmp_path: Path, legacy: bool):
    """Tokenizers after SentencePiece's manner begin every text with a space; a response goes on from its prompt."""
    tokenizer = make_sentencepiece_tokenizer(legacy=legacy)
    tokenizer.save_pretrained(tmp_path)
    (sequence,) = load([{"prompt": "1+1=", "completion": "2"}], str(tmp_path))
    assert tokenizer.convert_ids_to_tokens(sequence.token_ids) == ["▁", "1", "+", "1", "=", "2", "</s>"]
    (sequence,) = load([{"messages": TALK}], str(tmp_path), messages_column="messages")
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert sequence.token_ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    targets = tokenizer.convert_ids_to_tokens(sequence.token_ids[sequence.loss_mask])
    assert targets == ["▁", "2", "</s>", "▁", "4", "</s>"]


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path: Path):
    """Trap: with such a template the cut would put targets on the wrong tokens."""
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = LATE_CHANGE
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"train row 0 of .*changes earlier text when message 3 \(assistant\)"):
        load([{"messages": TALK}], str(tmp_path), messages_column="messages")
    (sequence,) = load([{"messages": TALK[:2]}], str(tmp_path), messages_column="messages")
    assert texts(tokenizer, sequence) == ("user:1+1=;assistant:2;", "2;")


THOUGHT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_an_answer_that_does_not_begin_as_the_template_lets_a_model_begin_is_refused_with_what_it_lacks(
    tokenizer, tmp_path: Path
):
    """Templates of models that always think open the thought themselves: the row has none."""
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = THOUGHT
    tokenizer.save_pretrained(tmp_path)
    lacking = (
        r"row 0 of .*lets an answer begin with '<\|im_start\|>assistant\\n<think>\\n', message 1 \(assistant\) begins"
    )
    with pytest.raises(ValueError, match=lacking):
        load([{"messages": TALK}], str(tmp_path), messages_column="messages")
    with pytest.raises(ValueError, match=lacking):
        load([{"prompt": "1+1=", "completion": "2"}], str(tmp_path), apply_chat_template=True)
    (sequence,) = load([{"prompt": "1", "completion": "<think>\n2"}], str(tmp_path), apply_chat_template=True)
    assert texts(tokenizer, sequence)[1] == "2<|im_end|>\n"


TOOLS = (
    "{% for message in messages %}{{ message['role'] }}:{% if 'tool_calls' in message %}"
    "{{ message.tool_calls | length }} calls{% else %}{{ message['content'] }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_fields_that_a_table_adds_to_messages_are_as_absent(tokenizer, tmp_path: Path):
    """Parquet and `datasets` give each message the fields of all; templates such as Llama 3.1's ask for them."""
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = TOOLS
    tokenizer.save_pretrained(tmp_path)
    calls = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "sum"}]}, *TALK[2:]]
    filled = [{"tool_calls": None, **message} for message in calls]
    for messages in (calls, filled):
        (sequence,) = load([{"messages": messages}], str(tmp_path), messages_column="messages")
        whole = "user:1+1=;assistant:1 calls;user:2+2=;assistant:4;"
        assert texts(tokenizer, sequence) == (whole, "1 calls;4;")
    wrong = [TALK[0], {**TALK[1], "tool_calls": 3}]
    with pytest.raises(
        ValueError, match=r"row 0 of .*template fails on .*'tool_calls'\]: TypeError: object of type 'int'"
    ):
        load([{"messages": wrong}], str(tmp_path), messages_column="messages")


def test_chat_without_a_template_is_refused(tokenizer, tmp_path: Path):
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"train row 0 of .*: the tokenizer '.*plain' has no chat template"):
        load([{"messages": TALK}], str(tmp_path / "plain"), messages_column="messages")


def _saved(tokenizer, directory: Path) -> str:
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_overlong_sequences(tokenizer, tokenizer_dir: str):
    rows = [{"prompt": "1+1=", "completion": c} for c in ("2", "222222222")] + [{"prompt": "1" * 9, "completion": "2"}]
    with told("2 of 3 rows dropped: more than max_length=8 tokens"):
        assert len(load(rows, tokenizer_dir, max_length=8)) == 1
    with pytest.raises(ValueError, match=r"train row 1 of .* has 14 tokens, max_length=8 \(2 of 3"):
        load(rows, tokenizer_dir, max_length=8, overlong="error")
    # cut at the end; the third row would have lost all its targets
    with told("1 of 3 rows dropped"):
        first, second = load(rows, tokenizer_dir, max_length=8, overlong="truncate")
    assert texts(tokenizer, first) == ("1+1=2<eos>", "2<eos>")
    assert texts(tokenizer, second) == ("1+1=2222", "2222")


@pytest.mark.parametrize(
    ("row", "kwargs", "message"),
    [
        ({"prompt": "1"}, {}, r"row 0 of .* has no column 'completion'; its columns are \['prompt'\]"),
        ({"prompt": "1", "completion": 2}, {}, r"row 0 of .*the completion is 2 \(int\), not text"),
        ({"prompt": "1", "completion": ""}, {"append_eos": False}, r"row 0 of .*no token to train on"),
        ({"prompt": "", "completion": "1"}, {}, r"row 0 of .*the prompt has no tokens"),
        ({"messages": TALK[:1]}, {"messages_column": "messages"}, r"row 0 of .*no assistant message to train on"),
        ({"messages": TALK[1:]}, {"messages_column": "messages"}, r"row 0 of .*begins with an assistant message"),
        ({"messages": "hi"}, {"messages_column": "messages"}, r"row 0 of .*'hi' \(str\) is neither"),
        ({}, {"messages_column": "m", "prompt_template": "{prompt}="}, r"messages_column='m' holds conversations"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_number(tokenizer_dir: str, row, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load([row], tokenizer_dir, **kwargs)


class BagOfTokens(L.LightningModule):
    """Predicts each answer token from the token before it; enough to need labels, mask and sequence borders right."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(128, 128)
        self.losses: list[float] = []

    def training_step(self, batch: list[TokenSequence], batch_idx: int) -> torch.Tensor:
        (packed,) = make_microbatches(batch, [range(len(batch))])
        loss = torch.nn.functional.cross_entropy(self.table(packed.tokens[packed.mask]), packed.labels[packed.mask])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.3)


def test_trains_under_a_plain_trainer_on_the_generated_set(tokenizer_dir: str, tmp_path: Path):
    data = SFTDataModule(ArithmeticRows("train", 64), tokenizer_dir, completion_column="answer", batch_size=16)
    torch.manual_seed(0)
    model = BagOfTokens()
    L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, data)
    assert len(model.losses) == 40
    # from log(128) = 4.85 and more to less than guessing among the ten digits and the end: log(11) = 2.4
    assert model.losses[0] > 4 > 2.4 > model.losses[-1]
