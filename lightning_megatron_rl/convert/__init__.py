"""Hugging Face checkpoints into distributed ones and back, without holding a model in memory: `convert`."""
