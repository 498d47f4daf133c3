"""Whether Megatron computes a model as Transformers does: shipped proofs, and the probe."""
