"""How weights reach a sampler: one file for each way, and what receives them."""
