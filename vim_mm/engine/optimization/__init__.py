"""The step of the optimizer: gradients, precision, learning rates and averages."""
