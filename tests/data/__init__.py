"""Tests of `lightning_megatron_rl.data`."""
