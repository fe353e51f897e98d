"""How fast checkpoints are saved, loaded and exported, beside a raw copy of the bytes and beside other systems.

One run holds everything that is compared: for every case a pool of real ranks is started, one round of each contender
warms up and is checked (a load must have filled its targets with the right bits), and then the contenders take turns,
round by round, on a file system in memory. What is shown is the median of the rounds; a ratio is the median of the
ratios within one round, so that a machine that slows down slows both sides.

Contenders: a raw copy (``os.write``, ``os.preadv``), safetensors, Paddle's own FlexCheckpoint in both of its formats,
PyTorch Distributed Checkpoint where torch is installed, and this package.

Run with ``make bench``; it takes some ten minutes, 10 GiB of memory, and a machine that does nothing else.
"""
