"""Facts about a machine, measured once, and checks of what a run needs of it."""
