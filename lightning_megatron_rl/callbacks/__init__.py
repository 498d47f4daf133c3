"""Side effects of a run: weights to the engine, models to disk, samples to the eye."""
