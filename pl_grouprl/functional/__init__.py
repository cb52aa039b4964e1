"""Mathematics on tensors, without models, trainers or padding: pure functions and thin classes over them."""
