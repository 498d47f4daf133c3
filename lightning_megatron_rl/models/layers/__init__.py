"""Parts of models of all families: layers, experts, adapters, log-probs."""
