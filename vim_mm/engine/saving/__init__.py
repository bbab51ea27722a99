"""The folder of a training: who may write there, what it wrote, where it continues."""
