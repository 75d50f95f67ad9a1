"""The public `Runtime`, which looks up each batch's rows and updates the tables with the rows' gradients."""
