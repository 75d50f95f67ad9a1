"""Preparation of a data set on a cluster, by tasks of Dask's distributed scheduler (`--scheduler`).

Workers read the source and write pieces, the vocabulary and shards in the work folder, which all of them share. The
client keeps the journal, and gets only counts, checksums and places. The data set's bytes are those of one machine:

- `ranges` divides the source as its blocks are divided on one machine; `first` has the tasks that parse them.
- `words` has the tasks that find the vocabulary by hash ranges, `last` those for scaling and shards.
- `job` describes the work to a worker, and checks the worker; `runner` submits tasks, and keeps and verifies results.
- `connection` connects to a scheduler or starts local workers; `prepare` is the client's part.
"""
