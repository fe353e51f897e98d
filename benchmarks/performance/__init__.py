"""How fast checkpoints are saved, loaded and exported, beside a raw copy of the bytes and beside other systems.

One run holds everything that is compared, on a file system in memory. In every round the contenders take turns, and
each turn has a fresh process per rank, as a job has. Its first call imports the contender, opens, plans and reads; a
later call repeats it. The first round checks that a load has filled its targets with the right bits. What is shown is
the median of the rounds; a ratio is the median of the ratios within one round, so that a machine that slows down slows
both sides.

Contenders: a raw copy (``os.write``, ``os.preadv``), safetensors, Paddle's own FlexCheckpoint in both of its formats,
PyTorch Distributed Checkpoint where torch is installed, and this package.

Run with ``make bench``; it takes some two hours, 16 GiB of memory, and a machine that does nothing else.
"""
