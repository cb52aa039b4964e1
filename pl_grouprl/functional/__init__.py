"""The mathematics: pure functions of tensors and thin classes over them, without models or trainers."""
