"""From video files to batches: catalog, order, curriculum, ledger, supervised decoding.

Other training loops import `longtake.data.loader.Loader`; see `examples/own_loop.py`.
"""
