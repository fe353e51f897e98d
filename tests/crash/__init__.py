"""Whatever happens to a save, and at whatever instant: a whole checkpoint is found afterwards, and no mixture ever.

``net`` sees every operation on files that this package makes and can stop the process there. ``groups`` forks the
ranks of a job. ``worlds`` says what is saved and how it is checked. ``kills`` and ``exports`` have the jobs, and
``killing`` kills their ranks; ``refusals`` and ``power`` have two further kinds of accidents. ``sweep`` counts through
the instants of all of them in a process of its own.
"""
