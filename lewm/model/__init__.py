"""The world model: encoder, predictor, regulariser. Knows tensors only: no environment, data or planner."""
