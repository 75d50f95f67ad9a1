"""Data sets: a schema, a manifest and shards, read as batches; imported as hostdev.data."""
