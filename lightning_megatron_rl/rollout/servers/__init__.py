"""Engines that somebody else has started: vLLM servers, by their URLs."""
