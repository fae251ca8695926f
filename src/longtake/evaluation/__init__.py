"""From saved weights to videos one can look at."""
