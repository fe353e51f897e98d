"""A longer proof: a run is saved after 50 steps, resumed under another layout, and trained for 200 steps more.

The losses of the resumed runs are compared with those of the run that was not interrupted, at every step.
``python -m verification.long_run`` writes ``docs/results/long_run.md`` and its picture.
"""
