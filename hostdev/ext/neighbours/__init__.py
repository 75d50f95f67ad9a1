"""Nearest rows of embedding tables: `python -m hostdev.neighbours`, and indexes for FAISS."""

METRICS = ("cosine", "dot", "l2")
INDEXES = ("flat", "hnsw")
