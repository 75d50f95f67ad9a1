"""Many processes: where each finds its place, how they meet, and what crosses between them."""
