"""Checkpoints on disk: tables, optimizer state and dense layers at one moment (docs/internals/checkpoint-format.md).

`manifest` describes a checkpoint; `folder` finds, commits and prunes checkpoints; `ranges` reads and writes files
with table rows, and `tree` converts other values. `manager` and `writer` save checkpoints during training; `loading`
loads them. `export`, `compact`, `reshard` and `diff` work offline.
"""
