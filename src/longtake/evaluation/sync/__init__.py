"""Runs that are trained elsewhere: mirrored from there, and given their results back.

    address.py    what --source says
    rules.py      which files of a tree are meant, in rsync's own words
    selection.py  which files of a run are mirrored and pushed
    transport.py  what carries them: by_rsync.py, by_fsspec.py (and said.py, what went wrong)
    arrival.py    a checkpoint becomes visible in the mirror when it is whole
    results.py    brings results and the server's heartbeat to the source
    source.py     looks, pulls, pushes
    prune.py      forgets checkpoints that are evaluated

The mirror is a run directory like any other, so that whoever evaluates knows nothing of this.
"""
