"""General helpers that know nothing of rollouts: options, errors, files, processes, ranks, checkpoints."""
