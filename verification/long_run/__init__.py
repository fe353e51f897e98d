"""A longer proof: a run is saved after 50 steps, resumed under another layout, and trained for 200 steps more.

At every step, the losses of the resumed runs are compared with the uninterrupted run's.
``python -m verification.long_run`` writes ``docs/results/long_run.md`` and its picture.
"""
