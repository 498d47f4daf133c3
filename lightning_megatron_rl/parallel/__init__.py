"""The layout of a run, its process groups, messages between ranks, and how ranks are started."""
