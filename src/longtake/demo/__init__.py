"""The demo: a model of moving shapes, whose samples are checked by their pixels alone."""
