"""Configs for real models: written from a plan (`init`), and shrunk so that they run on a CPU (`fit --shrink`)."""
