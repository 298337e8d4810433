"""Training: the two-term objective, the optimiser, and the loop around them."""
