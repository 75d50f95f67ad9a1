"""The command that trains: its options, its input, and the parts of a run that come from other extensions."""
