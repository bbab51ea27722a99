"""Files of weights: how they are read, what they say of a model, and what is written."""
