"""The model families: one file for each, with all that is special to it."""
