"""Checkpoints on disk: shards, manifest, directories that appear complete, the optimizer's state."""
