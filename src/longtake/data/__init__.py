"""From video files to batches: catalog, decoding, order, buckets, loader."""
