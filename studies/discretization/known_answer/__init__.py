"""A regression whose exact states are known: README.md has what came out."""
