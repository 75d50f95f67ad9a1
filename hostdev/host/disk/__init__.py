"""A disk tier: segments of rows in files, and the rows of a table that are in memory."""
