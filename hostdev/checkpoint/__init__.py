"""Checkpoints: tables, slots and dense layers as of one moment, on disk. See docs/checkpoints.md.

manifest: what a checkpoint says of itself. folder: several of them, whole or not. ranges: files of tables' rows.
tree: values beside the tables. saving, loading: from a running training, and back. export, compact, diff: offline.
"""
