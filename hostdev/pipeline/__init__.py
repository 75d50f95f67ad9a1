"""A batch's way: in-flight batches, read-after-write hazards, the stages and their threads."""
