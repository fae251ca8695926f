"""The demo: moving shapes, trained and judged from their own pixels."""
