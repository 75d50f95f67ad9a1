"""Who runs which stage when: passes, their threads and queues, and who waits for which rows."""
