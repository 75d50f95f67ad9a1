"""Models; imported as hostdev.models."""
