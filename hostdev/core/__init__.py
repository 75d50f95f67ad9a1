"""What every room may use: errors, optimizers and initial values of rows, ops with names and clocks, memory needed."""
