"""Data preparation; imported as hostdev.data."""
