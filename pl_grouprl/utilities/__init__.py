"""What every part may use and that knows nothing of rollouts: options, errors, files, processes, ranks, checkpoints."""
