"""Checkpoints on disk: tables, optimizer state and dense layers at one moment (docs/internals/checkpoint-format.md).

`manifest` describes a checkpoint; `folder` finds, commits and prunes checkpoints; `ranges` reads and writes files
with table rows, and `state` converts other values. `manager` and `writer` save checkpoints during training; `loading`
loads them. The commands that work on saved checkpoints are in `hostdev.ext.checkpoints`.
"""
