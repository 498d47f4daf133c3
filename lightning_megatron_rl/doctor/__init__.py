"""The command `doctor`: what a machine has, what it lacks, and how to fix it."""
