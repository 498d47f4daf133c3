"""Whether a run fits: memory, by arithmetic, before anything is loaded."""
