"""The integration into PaddleFormers' Trainer: the only package that changes how the Trainer saves and resumes.

Without ``flex_checkpoint: true`` everything here calls PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself remains PaddleFormers' own.

:mod:`.entry` replaces methods of the Trainer for training arguments with ``flex_checkpoint: true``, for
``FlexTrainer``, in ``install()``, and for a YAML whose ``custom_register_path`` is ``register.py``.

Importing this package imports neither Paddle nor PaddleFormers. :mod:`paddleformers_fc` exports the names for scripts.

==============================================  ===============================================================
``options``, ``cli_arguments``                  the options, and the command line's argument class with them
``entry``, ``register``                         the table of replaced methods, and the entry points
``startup``, ``session``, ``events``            construction and checks, parts of one Trainer, events of its loop
``save``, ``lineage``                           saves, exports, runs that share a directory
``async_save``, ``ema``                         asynchronous saves and moving averages
``uploads``                                     ``save_total_limit``, and uploads to an object store
``resume``, ``loading``, ``restore``            choose a checkpoint, load it, create missing states
``live_roles``, ``optimizers``                  tensors by role; supported optimizers, sharding stage 3
``documents``                                   metadata files: scheduler, tokenizer, Trainer state, configuration
``position``, ``batches``, ``rng``              position in the data, differences between runs, random states
``description``, ``base_fingerprint``           the live configuration; the base of adapters, failed loads
``pretrained``                                  open weights, adapters; the replaced ``from_pretrained``
``library``                                     the installed library and its names
``callback``                                    best checkpoint, log lines and events
``rank_records``                                figures and errors for the process that starts the ranks
``stock_keys``                                  keys, types, choices and defaults of its command line
``loop``                                        ``save`` and ``load`` without a Trainer
==============================================  ===============================================================
"""
