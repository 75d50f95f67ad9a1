"""Checkpoints: tables, optimizer state and dense layers at one moment, on disk. See docs/checkpoints.md.

`manifest` describes a checkpoint; `folder` finds, commits and prunes checkpoints; `ranges` reads and writes files of
rows, `tree` other values. `manager` and `writer` save from a running training; `loading` loads. `export`, `compact` and
`diff` work offline.
"""
