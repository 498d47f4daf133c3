"""Small tools that every folder may use: files, errors, ranges, versions, CPUs."""
