"""Mathematics on tensors, without models or trainers: pure functions and thin classes over them."""
