"""What is wrong with a config, before its first iteration."""
