"""The report of a run: one HTML file from what the run has written."""
