"""Names and shapes of tensors in a model's checkpoint, as the installed Transformers saves and loads them.

Transformers 5 keeps the experts of a layer in one parameter and converts them from and to the checkpoint's names when
it loads and saves; `revert_weight_conversion` is what its `save_pretrained` calls for that.
"""

from typing import Any


def checkpoint_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that `save_pretrained` of a Transformers model writes, by name.

    Args:
        model: On the meta device, or any other.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}


def ignored_patterns(model: Any) -> list[str]:
    """Return regular expressions of tensor names that Transformers leaves out without a word when it loads a model."""
    # every layer's rotary frequencies, which older versions saved; the second half is added by Transformers itself
    return [*(model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq$"]


def tied_names(model: Any) -> list[str]:
    """Return the tensors that a checkpoint may leave out because they are another one."""
    return list(model.all_tied_weights_keys)
