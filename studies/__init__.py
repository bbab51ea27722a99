"""Studies made with this package, each in a room of its own; not installed with it."""
