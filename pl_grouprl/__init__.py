"""PyTorch Lightning modules for reinforcement learning of language models whose rollouts come in groups."""
