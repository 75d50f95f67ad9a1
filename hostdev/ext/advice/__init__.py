"""Advice: `hostdev advise`, and the sizes that training chooses for `auto`."""
