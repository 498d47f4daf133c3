"""vLLM as a rollout engine: in a process of its own, or in the trainer's."""
