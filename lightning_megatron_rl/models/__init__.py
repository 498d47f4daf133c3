"""Hugging Face checkpoints as Megatron models: building, loading, exporting, and log-probs under model parallelism."""
