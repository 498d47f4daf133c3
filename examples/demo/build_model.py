"""Write a small random Qwen3 and its character tokenizer: ``build_model.py DIRECTORY``. Nothing is downloaded.

With ``--characters "0123456789+-*=[];"`` it knows those of other tasks than the demo's.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-="
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def build_model(directory: Path, seed: int = 0, characters: str = CHARACTERS, **sizes: int) -> None:
    """Write model and tokenizer in Hugging Face format; `sizes` are fields of `Qwen3Config`."""
    tokens = [*SPECIAL_TOKENS, *characters]  # the demo's 16 divide by the tensor-parallel sizes in use
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokens),
        **{**SIZES, **sizes},
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a small random Qwen3 and its character tokenizer.")
    parser.add_argument("directory", type=Path, help="where to write them")
    parser.add_argument("--characters", default=CHARACTERS, help="of the tokenizer")
    options = parser.parse_args()
    build_model(options.directory, characters=options.characters)
