"""From a checkpoint's weights to videos on the disk."""
