"""The command `lightning-megatron-rl serve`: a vLLM server for trainers on other hosts."""
