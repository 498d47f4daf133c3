from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from lightning_megatron_rl.data import PromptDataModule
from lightning_megatron_rl.data.prompts import extract_answer
from lightning_megatron_rl.sample import Prompt
from tests.notices import told

GSM8K = [
    {"question": "Tom has 24 + 48 apples. How many?", "answer": "He has 24+48=<<24+48=72>>72.\n#### 72"},
    {"question": "And 500 + 500?", "answer": "500+500=1,000\n#### 1,000"},
]
USER = [{"role": "user", "content": "1+1="}]


def load(rows: list[dict[str, Any]], tokenizer_dir: str, **kwargs: Any) -> list[Prompt]:
    """All prompts in order, as one batch."""
    data = PromptDataModule(lambda: rows, tokenizer_dir, shuffle=False, **{"batch_size": 1, **kwargs})
    data.setup("fit")
    return [prompt for batch in data.train_dataloader() for prompt in batch]


def test_gsm8k_works_as_it_is(tokenizer_dir: str, tokenizer):
    prompts = load(GSM8K, tokenizer_dir)
    assert [prompt.answer for prompt in prompts] == ["72", "1,000"]
    assert prompts[0].text == GSM8K[0]["question"]
    assert tokenizer.decode(prompts[0].token_ids) == GSM8K[0]["question"]
    assert [(prompt.index, prompt.dataset, prompt.columns) for prompt in prompts] == [
        (0, "train", {}),
        (1, "train", {}),
    ]


def test_columns_are_mapped_and_others_kept(tokenizer_dir: str):
    (prompt,) = load(
        [{"text": "1+1=", "solution": 2, "level": "easy", "id": 7}],
        tokenizer_dir,
        prompt_column="text",
        answer_column="solution",
    )
    assert (prompt.text, prompt.answer, prompt.columns) == ("1+1=", "2", {"level": "easy", "id": 7})
    (prompt,) = load([{"prompt": "Write a poem.", "answer": "x"}], tokenizer_dir, answer_column=None)
    assert (prompt.answer, prompt.columns) == (None, {"answer": "x"})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is 24.\n#### 24\n", "24"),
        ("one line #### 24", "24"),
        (" 24 ", " 24 "),
        ("#### A heading\nand its text", "#### A heading\nand its text"),
        (0.5, "0.5"),
        (True, "True"),
    ],
)
def test_answers_are_extracted_or_left_whole(answer: Any, expected: str):
    assert extract_answer(answer, "####") == expected
    assert extract_answer(answer, None) == str(answer)


def test_plain_template(tokenizer_dir: str):
    template = r"Put the result into \boxed{}. {prompt}="
    (prompt,) = load([{"prompt": "{1}+1", "answer": "2"}], tokenizer_dir, prompt_template=template)
    assert prompt.text == r"Put the result into \boxed{}. {1}+1="
    with pytest.raises(ValueError, match=r"prompt_template='\{question\}' does not contain \{prompt\}"):
        PromptDataModule("a.jsonl", tokenizer_dir, prompt_template="{question}")


def test_chat_template_for_text_and_for_messages(tokenizer_dir: str, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": USER, "answer": "2"}]
    expected = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    for prompt in load(rows, tokenizer_dir, apply_chat_template=True):
        assert prompt.text == expected
        assert prompt.token_ids == tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    plain, chat = load(rows, tokenizer_dir)  # a list of messages needs no option
    assert (plain.text, chat.text) == ("1+1=", expected)
    for prompt in load(rows, tokenizer_dir, apply_chat_template=True, system_prompt="Add."):
        assert prompt.text == "<|im_start|>system\nAdd.<|im_end|>\n" + expected


def test_special_tokens_only_without_chat_template(tokenizer, tmp_path):
    bos = tokenizer.bos_token_id
    with_bos = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    with_bos._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    with_bos.save_pretrained(tmp_path)
    rows = [{"prompt": "1+1=", "answer": "2"}]
    ids = {
        name: load(rows, str(tmp_path), **kwargs)[0].token_ids
        for name, kwargs in {
            "plain": {},
            "without": {"add_special_tokens": False},
            "chat": {"apply_chat_template": True},
        }.items()
    }
    assert ids["plain"] == [bos, *ids["without"]]
    assert bos not in ids["without"] + ids["chat"]


def _saved(tokenizer, directory) -> str:
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_overlong_prompts_are_dropped_and_counted_or_refused(tokenizer_dir: str):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 9, 4, 7)]
    with told("train: 2 of 4 rows dropped: more than max_prompt_length=4 tokens"):
        prompts = load(rows, tokenizer_dir, max_prompt_length=4)
    assert [prompt.index for prompt in prompts] == [0, 2]  # rows keep their numbers
    with pytest.raises(ValueError, match=r"train row 1 has 9 tokens, max_prompt_length=4 \(2 of 4 rows.*at least 9"):
        load(rows, tokenizer_dir, max_prompt_length=4, overlong_prompts="error")
    with pytest.raises(ValueError, match=r"all 4 rows of train have more than max_prompt_length=2.*shortest: 3"):
        load(rows, tokenizer_dir, max_prompt_length=2)


@pytest.mark.parametrize(
    ("row", "kwargs", "message"),
    [
        ({"answer": "2"}, {}, r"train row 1 of .* has no column 'prompt'; its columns are \['answer'\]"),
        ({"prompt": "1"}, {}, r"train row 1 of .*answer_column: null.* has no column 'answer'"),
        ({"prompt": 7, "answer": "2"}, {}, r"train row 1 of .*: 7 \(int\) is neither text nor"),
        ({"prompt": [], "answer": "2"}, {}, r"train row 1 of .*: \[\] \(list\) is neither"),
        ({"prompt": ["hi"], "answer": "2"}, {}, r"train row 1 of .*: message 0 is 'hi', not a dict"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, {}, r"train row 1 of .*: message 0 is \{'role': 'user'\}"),
        ({"prompt": "", "answer": "2"}, {}, r"train row 1 of .*: the prompt '' has no tokens"),
        (
            {"prompt": [*USER, {"role": "assistant", "content": "2"}], "answer": "2"},
            {},
            r"train row 1 of .*ends with an assistant message",
        ),
        (
            {"prompt": USER, "answer": "2"},
            {"prompt_template": "{prompt}="},
            r"prompt_template='\{prompt\}=' is for text",
        ),
        (
            {"prompt": [{"role": "system", "content": "x"}, *USER], "answer": "2"},
            {"apply_chat_template": True, "system_prompt": "y"},
            r"train row 1 of .*system message of their own",
        ),
        ({"prompt": "1", "answer": "2"}, {"system_prompt": "y"}, r"system_prompt needs apply_chat_template=True"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_number(tokenizer_dir: str, row, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load([{"prompt": "1+1=", "answer": "2"}, row], tokenizer_dir, **kwargs)


def test_tokenizer_that_is_missing_or_has_no_chat_template(tokenizer, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from '.*nowhere'"):
        load(rows, str(tmp_path / "nowhere"))
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"train row 0 of .*: the tokenizer '.*plain' has no chat template"):
        load(rows, str(tmp_path / "plain"), apply_chat_template=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(tmp_path / "raises")
    with pytest.raises(
        ValueError, match=r"train row 0 of .*refuses messages with roles \['user'\]: roles must alternate"
    ):
        load(rows, str(tmp_path / "raises"), apply_chat_template=True)


def test_batch_arithmetic_is_checked_in_setup(tokenizer_dir: str):
    rows = [{"prompt": "1+1=", "answer": "2"}] * 5
    with pytest.raises(ValueError, match=r"has 5 rows, batch_size is 8: 5 // 8 = 0 batches per epoch.*at most 5"):
        load(rows, tokenizer_dir, batch_size=8)
    with pytest.raises(ValueError, match="batch_size=0"):
        PromptDataModule("a.jsonl", tokenizer_dir, batch_size=0)
    with pytest.raises(ValueError, match="cannot be named 'train'"):
        PromptDataModule("a.jsonl", tokenizer_dir, {"train": "a.jsonl"})


def test_validation_sets_carry_their_names(tokenizer_dir: str):
    rows = [{"prompt": "1+1=", "answer": "2"}] * 3
    data = PromptDataModule("missing.jsonl", tokenizer_dir, {"easy": lambda: rows, "hard": lambda: rows[:1]})
    data.setup("validate")  # needs no training set
    easy, hard = data.val_dataloader()
    assert [[prompt.dataset for prompt in batch] for batch in (*easy, *hard)] == [["easy"] * 3, ["hard"]]
