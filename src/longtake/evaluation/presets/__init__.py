"""What is sampled of each checkpoint."""
