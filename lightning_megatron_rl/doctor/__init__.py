"""What a machine has, what it lacks, and what helps: the command `doctor`."""
