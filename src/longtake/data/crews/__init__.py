"""Who does the work on clips: processes of this machine, or of all machines of a Ray cluster.

errand.py      what is done to each item, and the seam: `Crew.work(errand, items)`
choice.py      from `--on` to a crew
processes.py   this machine's processes
hands.py       processes that may hang or crash, as who watches them sees them
hand.py        one such process
cluster.py     Ray: connecting, and what can be wrong with that
gang.py        Ray: one errand's workers, and which of them has which items
batches.py     which items go together, and which come back
far.py         Ray: what runs on a worker, around a process of its own
"""
