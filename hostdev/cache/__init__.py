"""The embedding cache: hot rows and their optimizer slots on the device, chosen with the coming batches known.

`planner` decides on the host which rows to admit, to evict and to let pass (numpy and numba only); `slots` keeps them
on the device (torch); `cache.EmbeddingCache` joins both to host tables. Needs nothing of the trainer.
"""
