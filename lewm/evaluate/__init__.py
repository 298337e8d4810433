"""Evaluation: the only place where environment and model meet, and the only reader of the true state."""
