"""Whatever is fast and unreadable: CUDA, Triton and NVRTC. Same numbers as the bricks of ``lewm.model``, for less work.

- ``attention``, ``mlp``: the encoder's two sub-layers in training.
- ``rollout``: which planning rollout suits a model. ``rollout_fast`` is plain PyTorch, ``rollout_triton`` and
  ``rollout_cluster`` are kernels for Hopper GPUs.
- ``search``: what a planner does besides imagining futures.

The bricks import this package, never the other way round.
"""
