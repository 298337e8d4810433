"""Planning: search for the action blocks whose imagined outcome is nearest to the goal.

Solvers know tensors and a callable cost; they never see the model, the environment or the true state.
"""
