"""Whatever happens to a save, and at whatever instant: a whole checkpoint is found afterwards, and no mixture ever.

``net`` sees every operation on files that this package makes and can stop the process there. ``groups`` forks the
ranks of a job. ``worlds`` says what is saved and how it is checked. ``kills``, ``exports``, ``refusals`` and ``power``
each count through the instants of one kind of accident; ``sweep`` runs them in a process of their own.
"""
