"""LightningModules: a language model on Megatron, fine-tuned or trained with reinforcement learning."""
