"""What a clip can be scored by, one file per score."""
