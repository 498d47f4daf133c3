"""The command `plan`: whether a config fits GPUs that need not be here, how long a step takes, and what to change."""
