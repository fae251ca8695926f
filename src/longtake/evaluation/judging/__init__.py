"""What is said of a result beyond each of its videos."""
