"""Transports of weights to samplers, one file each, and their receivers."""
