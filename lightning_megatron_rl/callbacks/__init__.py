"""Callbacks: weight sync, exports, averages, samples, progress."""
