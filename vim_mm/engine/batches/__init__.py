"""What a step trains on: its images, their order and their random numbers."""
