"""The public `Runtime`: looks up the rows of each batch, and updates the tables with their gradients."""
