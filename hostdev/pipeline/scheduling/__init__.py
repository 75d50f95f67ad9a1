"""Scheduling of the stages: passes, their threads and queues, and which batch waits for which rows."""
