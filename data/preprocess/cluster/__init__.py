"""Preparation of a data set on a cluster, by tasks of Dask's distributed scheduler (`--scheduler`).

Workers read the source and write pieces, the vocabulary and shards in the work folder, which all of them share. The
client keeps the journal; workers send it only small results, such as counts and checksums. The data set has the same
bytes as on one machine, where threads run the same tasks (in `runner`, `first_pass`, `learning`, `words`, `tasks`).
This package has two modules:

- `prepare` is the client's part: it connects to a scheduler or starts local workers, divides the source into ranges,
  and submits tasks.
- `job` is the workers' part: it opens the work that the client describes, checks the worker, and runs tasks.
"""
