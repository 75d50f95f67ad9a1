"""The pipeline: a batch's stages, read-after-write hazards, and the threads that run the stages."""
