"""Training around the model: the runner and the checkpoint loader. Importing this registers them."""
