"""The evaluation server: finds what is due, claims it, evaluates it, publishes what came out."""
