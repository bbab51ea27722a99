"""What the people who do this job met, tried from the command line."""
