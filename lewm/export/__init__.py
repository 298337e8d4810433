"""From a training run to a folder to publish: bf16 weights, description, model card."""
