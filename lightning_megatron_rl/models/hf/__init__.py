"""Hugging Face checkpoints: finding, checking, reading, converting and writing them."""
