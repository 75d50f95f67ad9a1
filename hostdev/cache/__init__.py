"""The embedding cache: hot rows and their optimizer state on the device, chosen by looking ahead at the next batches.

`planner` decides on the host which rows are admitted, evicted and bypassed (numpy and numba only). `slots` keeps rows
on the device (torch). `cache.EmbeddingCache` connects `planner` and `slots` to host tables; it can be used without the
trainer.
"""
