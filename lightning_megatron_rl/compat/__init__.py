"""What Megatron-core and Megatron-Bridge need where there is no GPU or no Transformer Engine, and nothing else."""
