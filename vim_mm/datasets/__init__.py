"""Data: makes the built-in shapes data set; mm's own dataset classes read it."""
