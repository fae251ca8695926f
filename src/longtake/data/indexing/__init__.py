"""What `longtake.data.index` is made of: finding files, their captions, and what is in each.

sources.py    folders, files, lists, tables and tars to items (listing.py, tars.py, item.py)
captions.py   which caption belongs to which item
probe.py      one file read from its first byte to its last frame
probing.py    many of them, in processes that may hang or crash
journal.py    what was read before, so that nothing is read twice
"""
