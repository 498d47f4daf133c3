"""Reinforcement-learning post-training at Megatron scale from a plain Lightning `Trainer`."""
