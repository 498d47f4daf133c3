"""Whether a run fits: memory and divisibility, by arithmetic, before anything is loaded."""
