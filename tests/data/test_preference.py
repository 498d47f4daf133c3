from typing import Any

import pytest

from lightning_megatron_rl.data import PreferenceDataModule, PreferencePair
from tests.data.test_sft import texts
from tests.notices import told

ROW = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
ASKED = [{"role": "user", "content": "1+1="}]


def talk(answer: str, question: str = "1+1=") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def load(rows: list[dict[str, Any]], tokenizer_dir: str, **kwargs: Any) -> list[PreferencePair]:
    """All pairs in order, as batches of one."""
    data = PreferenceDataModule(lambda: rows, tokenizer_dir, shuffle=False, **{"batch_size": 1, **kwargs})
    data.setup("fit")
    return [pair for batch in data.train_dataloader() for pair in batch]


def test_text(tokenizer, tokenizer_dir: str):
    (pair,) = load([ROW], tokenizer_dir)
    assert texts(tokenizer, pair.chosen) == ("1+1=2<eos>", "2<eos>")
    assert texts(tokenizer, pair.rejected) == ("1+1=11<eos>", "11<eos>")
    assert len(pair) == 7
    (pair,) = load([{"q": "1", "a": "2", "b": "3"}], tokenizer_dir, prompt_column="q", chosen_column="a",
                   rejected_column="b", append_eos=False)  # fmt: skip
    assert texts(tokenizer, pair.rejected) == ("13", "3")


def test_chat(tokenizer, tokenizer_dir: str):
    whole = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    rows = [
        ({**ROW}, {"apply_chat_template": True}),
        ({**ROW, "prompt": ASKED}, {}),
        ({"chosen": talk("2"), "rejected": talk("11")}, {}),  # conversations hold the prompt
    ]
    for row, options in rows:
        (pair,) = load([row], tokenizer_dir, **options)
        assert texts(tokenizer, pair.chosen) == (whole, "2<|im_end|>\n")
        assert texts(tokenizer, pair.rejected)[1] == "11<|im_end|>\n"


def test_only_the_last_answer_of_a_conversation_is_compared(tokenizer, tokenizer_dir: str):
    row = {"chosen": talk("2") + talk("4", "2+2="), "rejected": talk("2") + talk("5", "2+2=")}
    (pair,) = load([row], tokenizer_dir, system_prompt="Add.")
    whole, target = texts(tokenizer, pair.chosen)
    assert whole.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n")
    assert target == "4<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, r"1 of .*'rejected' is not there.*\['chosen', 'prompt'\].*rejected_column"),
        ({**ROW, "rejected": None}, r"train row 1 of .*'rejected' is None: a preference pair needs both of its sides"),
        ({**ROW, "chosen": ""}, r"train row 1 of .*'chosen' is '': a preference pair"),
        ({**ROW, "chosen": " "}, r"train row 1 of .*'chosen' is ' '"),
        ({**ROW, "chosen": talk("2")}, r"'chosen' is list, 'rejected' is str: both are text, or both conversations"),
        ({"chosen": talk("2"), "rejected": talk("2", "1+2=")}, r"train row 1 of .*differ before their last message"),
        ({"chosen": ASKED, "rejected": talk("2")}, r"'chosen' has the roles \['user'\]"),
        ({"chosen": "2", "rejected": "3"}, r"has no column 'prompt'"),
        ({**ROW, "prompt": ""}, r"the prompt has no tokens"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_number(tokenizer_dir: str, row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load([ROW, row], tokenizer_dir)


def test_a_template_of_text_prompts_is_refused_where_the_responses_are_conversations(tokenizer_dir: str):
    """It was ignored, so that the pairs were trained on with other prompts than were asked for."""
    row = {"chosen": talk("2"), "rejected": talk("3")}
    with pytest.raises(ValueError, match=r"train row 0 of .*: prompt_template='Q: \{prompt\}' is for text prompts"):
        load([row], tokenizer_dir, prompt_template="Q: {prompt}")


def test_pairs_that_teach_nothing_and_long_ones_are_dropped_and_counted(tokenizer_dir: str):
    rows = [ROW, {**ROW, "rejected": "2"}, {**ROW, "rejected": "1" * 20}]
    with told("rows dropped") as warned:
        assert len(load(rows, tokenizer_dir, max_length=8)) == 1
    assert any("1 of 3 rows dropped: chosen and rejected are equal" in text for text in warned)
    assert any("1 of 2 rows dropped: more than max_length=8 tokens" in text for text in warned)
    with pytest.raises(ValueError, match=r"train row 2 of .* has 25 tokens, max_length=8 \(1 of 2"):
        load(rows, tokenizer_dir, max_length=8, overlong="error")
    with pytest.raises(ValueError, match=r"in all 1 rows of train the chosen response equals the rejected one"):
        load([rows[1]], tokenizer_dir)
