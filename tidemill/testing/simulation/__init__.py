"""Whole stories of training runs, simulated: the real loader, feed, loop, assignment, checkpoints and records, on a virtual clock.

`threads` puts scheduled threads, locks and time under the product's own modules; `scheduler` lets one thread run at a time, picked
by a seed; so a story is a pure function of its seed. `story` makes one up and plays it, `check` says whether what came of it is
right.
"""
