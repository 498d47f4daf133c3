"""The command `schema`: a JSON schema of the YAML files."""
