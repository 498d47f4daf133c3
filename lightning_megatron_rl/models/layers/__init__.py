"""What models are made of, whatever their family: layers, experts, adapters, log-probs."""
