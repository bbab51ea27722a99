"""What a training shows while it runs: losses, the first NaN, and the kernels that ran."""
