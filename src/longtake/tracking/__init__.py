"""Tells experiment trackers what a run directory says; never imports torch.

`python -P -m longtake.tracking RUN --as trainer` is a process of its own, which follows the run's
files. One such process at a time writes: it holds the lease `tracking/writer`.

    follower.py      the loop: waits for its turn, tells the trackers, gives the turn back
    turn.py          whose turn it is: a lease, and who has precedence
    shutdown.py      when to end
    feed.py          what is new goes to one tracker, again and again, until it has arrived
    refusals.py      what a tracker cannot take is passed over in the end
    news.py          what is new: rows of metrics, events, evaluations
    cursor.py        how far a tracker has been told
    tracker.py       what a tracker is
    tensorboard.py   TensorBoard; event_file.py its files, summaries.py what is in them
    wandb.py         W&B; wandb_file.py reads its files, wandb_access.py whether it can be used
    process.py       starts the follower, from the training and from an evaluation server
"""
