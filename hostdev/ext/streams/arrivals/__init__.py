"""Files that arrive in a folder while a run trains on them: which is next, and its rows as batches."""
