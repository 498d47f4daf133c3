import shutil
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


def test_a_prompt_does_not_end_with_the_token_that_ends_texts(tokenizer, tmp_path):
    """Tokenizers with `add_eos_token` end every text; the policy would begin behind the end."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    with_both = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    with_both._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    with_both.save_pretrained(tmp_path)
    without, own = load([{"prompt": text, "answer": "2"} for text in ("1+1=", "1<eos>")], str(tmp_path))
    assert with_both.convert_ids_to_tokens(without.token_ids) == ["<bos>", "1", "+", "1", "="]
    assert with_both.convert_ids_to_tokens(own.token_ids) == ["<bos>", "1", "<eos>"], "as it is written"


def _saved(tokenizer, directory) -> str:
    tokenizer.save_pretrained(directory)
    return str(directory)


LONG = [{"prompt": "123456789"[:length], "answer": "1"} for length in (3, 9, 4, 7)]


def test_long_prompts_are_refused_dropped_or_cut(tokenizer_dir: str):
    with pytest.raises(ValueError, match=r"train row 1 of .* has 9 tokens: more than max_prompt_length=4.*2 of 4 prom"):
        load(LONG, tokenizer_dir, max_prompt_length=4)
    with told("2 of 4 prompts of train were dropped: more than max_prompt_length=4 tokens"):
        prompts = load(LONG, tokenizer_dir, max_prompt_length=4, on_long_prompt="drop")
    assert [prompt.index for prompt in prompts] == [0, 2]  # rows keep their numbers
    with told("2 of 4 prompts of train were cut at their beginning"):
        prompts = load(LONG, tokenizer_dir, max_prompt_length=4, on_long_prompt="truncate_left")
    assert [prompt.text for prompt in prompts] == ["123", "6789", "1234", "4567"]
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 4, 4, 4]
    with pytest.raises(ValueError, match=r"all 4 prompts of train are too long \(shortest: 3\).*max_prompt_length=2"):
        load(LONG, tokenizer_dir, max_prompt_length=2, on_long_prompt="drop")
    with pytest.raises(ValueError, match=r"on_long_prompt='cut': choose one of refuse, drop, truncate_left"):
        PromptDataModule("a.jsonl", tokenizer_dir, on_long_prompt="cut")


def test_prompts_are_held_to_what_the_engine_takes(tokenizer_dir: str, tokenizer):
    def data(**kwargs: Any) -> PromptDataModule:
        made = PromptDataModule(lambda: LONG, tokenizer_dir, {"easy": lambda: LONG[:1]}, batch_size=2, **kwargs)
        made.setup("fit")
        return made

    limits: dict[str, Any] = {"response": {"train": 5, "easy": 2}, "vocab_size": len(tokenizer)}
    data().fit_into_engine(14, **limits)
    with pytest.raises(
        ValueError,
        match=r"train row 1 of .* has 9 tokens: prompt \+ response \(5 tokens\) > engine\.max_model_len \(10\)",
    ):
        data().fit_into_engine(10, **limits)
    dropping = data(on_long_prompt="drop")
    for _ in range(2):  # a second run with the same data module counts them once
        with told(r"2 of 4 prompts of train were dropped.*leaves 5 tokens to a prompt"):
            dropping.fit_into_engine(10, **limits)
        assert dropping.long_prompts == {"train": 2, "easy": 0}
        assert [prompt.index for prompt in dropping.train_items] == [0, 2]
    dropping.fit_into_engine(14, **limits)  # another engine has room for all
    assert len(dropping.train_items) == 4
    cutting = data(on_long_prompt="truncate_left")
    with told("cut at their beginning"):
        cutting.fit_into_engine(10, **limits)
    assert [prompt.text for prompt in cutting.train_items] == ["123", "56789", "1234", "34567"]
    for longest in (14, 17):  # of a validation's responses: no token of a prompt was left, or less than none
        no_room = {"train": 5, "easy": longest}
        with pytest.raises(ValueError, match=rf"responses to easy .*14 - {longest} = -?\d tokens are left to a prompt"):
            data(on_long_prompt="truncate_left").fit_into_engine(14, no_room, limits["vocab_size"])
    with (
        pytest.raises(ValueError, match=r"training set has 1 rows, batch_size is 2"),
        told("3 of 4"),
    ):
        dropping.fit_into_engine(8, **limits)  # too few are left
    with pytest.raises(
        ValueError, match=r"train row 0 of .* has the token id \d+, .*is not the tokenizer of this model"
    ):
        data().fit_into_engine(14, limits["response"], vocab_size=5)


THINKING = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '<' + mood|default('plain') + '>' }}"
    "{% if thinking is defined and not thinking %}{{ 'quick' }}{% endif %}{% endif %}"
)


def test_chat_template_kwargs_reach_the_template_and_are_checked(tokenizer, tmp_path):
    tokenizer = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path))
    tokenizer.chat_template = THINKING
    directory = _saved(tokenizer, tmp_path / "chat")
    rows = [{"prompt": "1+1=", "answer": "2"}]

    def text(**kwargs: Any) -> str:
        return load(rows, directory, apply_chat_template=True, chat_template_kwargs=kwargs)[0].text

    assert text() == "user:1+1=<plain>"
    assert text(thinking=False, mood="glad") == "user:1+1=<glad>quick"
    with pytest.raises(ValueError, match=r"does not read thinkng; did you mean thinking\?"):
        text(thinkng=False)
    with pytest.raises(ValueError, match=r"does not read enabled_tools; it reads mood, thinking"):
        text(enabled_tools=True)
    with pytest.raises(ValueError, match=r"add_generation_prompt is set by the data module"):
        text(add_generation_prompt=False)
    with pytest.raises(ValueError, match=r"train row 0 of .*need apply_chat_template=True"):
        load(rows, directory, chat_template_kwargs={"thinking": False})


def test_a_tokenizer_that_cannot_be_read_is_named(tokenizer, tmp_path, monkeypatch):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    monkeypatch.setenv("HOME", str(tmp_path))
    home = _saved(tokenizer, tmp_path / "home")
    assert load(rows, "~/home")[0].text == "1+1="
    with pytest.raises(ValueError, match=r"tokenizer '~/nowhere' is neither a directory nor a hub name"):
        load(rows, "~/nowhere")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        damaged = tmp_path / f"damaged-{name}"
        shutil.copytree(home, damaged)
        content = (damaged / name).read_text()
        (damaged / name).write_text(content[: len(content) // 2])
        with pytest.raises(ValueError, match=rf"{damaged / name} is damaged: it cannot be read as JSON"):
            load(rows, str(damaged))
    (damaged / "tokenizer.json").write_text("{}")
    shutil.copy(tmp_path / "home" / "tokenizer_config.json", damaged)
    with pytest.raises(ValueError, match=rf"no tokenizer could be loaded from '{damaged}'"):
        load(rows, str(damaged))
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=rf"{damaged} has no tokenizer: none of tokenizer\.json,"):
        load(rows, str(damaged))
    with pytest.raises(ValueError, match=r"data\.tokenizer='': name the directory or hub name"):
        PromptDataModule("a.jsonl", "")


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_names_of_validation_sets_make_names_of_metrics(tokenizer_dir: str, name: str):
    with pytest.raises(ValueError, match="name it with letters"):
        PromptDataModule("a.jsonl", tokenizer_dir, {name: "a.jsonl"})


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
        (
            {"prompt": "1", "answer": ["2", "two"]},
            {},
            r"train row 1 of .*'answer' is \['2', 'two'\] \(list\)",
        ),
        ({"prompt": "1", "answer": {"text": "2"}}, {}, r"train row 1 of .*: the answer in 'answer' is .* \(dict\)"),
        ({"prompt": "1", "answer": float("nan")}, {}, r"train row 1 of .*: the answer in 'answer' is nan \(float\)"),
        ({"prompt": "1", "answer": "2"}, {"system_prompt": "y"}, r"system_prompt needs apply_chat_template=True"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_number(tokenizer_dir: str, row, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load([{"prompt": "1+1=", "answer": "2"}, row], tokenizer_dir, **kwargs)


def test_tokenizer_that_is_missing_or_has_no_chat_template(tokenizer, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    with pytest.raises(ValueError, match=r"tokenizer '.*nowhere' is neither a directory nor a hub name"):
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
