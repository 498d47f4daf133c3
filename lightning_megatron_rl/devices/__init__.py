"""What a machine has for a run, and what a run needs of it: facts measured once, refusals as pure functions of them."""
