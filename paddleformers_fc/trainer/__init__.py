"""The integration into PaddleFormers' Trainer: the only package that changes how the Trainer saves and resumes.

Without ``flex_checkpoint: true`` everything here calls PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself remains PaddleFormers' own.

:mod:`.entry` replaces methods of the Trainer for training arguments with ``flex_checkpoint: true``, for
``FlexTrainer``, in ``install()``, and for a YAML whose ``custom_register_path`` is ``register.py``.

Importing this package imports neither Paddle nor PaddleFormers. :mod:`paddleformers_fc` exports the names for scripts.

==============================================  ===============================================================
``options``, ``cli_arguments``                  the options, and the command line's argument class with them
``entry``, ``register``                         the table of replaced methods, and the entry points
``startup``, ``session``                        construction and checks; state, events and reports of one Trainer
``save``                                        saves, blocking and asynchronous, and exports
``ema``, ``ema_weights``                        moving averages, and their use
``tiers``, ``uploads``                          where a run saves, ``save_total_limit``, and an object store
``resume``, ``loading``                         choose a checkpoint, runs that share a directory; load it
``live_roles``, ``optimizers``                  tensors by role, missing states; optimizers, sharding stage 3
``documents``                                   metadata files: configuration, Trainer state, random generators
``position``                                    position in the data, differences between runs
``description``, ``models``                     the live configuration; statements, adapters, failed loads
``pretrained``                                  open weights, adapters; the replaced ``from_pretrained``
``library``                                     the installed library and its names
``rank_records``                                figures and errors for the process that starts the ranks
``stock_keys``                                  keys, types, choices and defaults of its command line
``loop``                                        ``save``, ``load`` and ``stream`` without a Trainer
==============================================  ===============================================================
"""
