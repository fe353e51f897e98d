"""The integration into PaddleFormers' Trainer: the only package that changes how it saves and resumes.

Without ``flex_checkpoint: true`` everything here calls PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself stays PaddleFormers' own.

The methods of the Trainer are replaced (:mod:`.entry`) for training arguments with ``flex_checkpoint: true``, for
``FlexTrainer``, by ``install()``, and by ``register.py``, the ``custom_register_path`` of a YAML.

Importing this package imports neither Paddle nor PaddleFormers. :mod:`paddleformers_fc` exports the names for scripts.

==============================================  ===============================================================
``options``, ``cli_arguments``                  the options, and the argument class of the command line with them
``entry``, ``register``                         the table of replaced methods, and the ways in
``startup``, ``session``, ``events``            construction and checks, parts of one Trainer, events of its loop
``save``, ``lineage``                           saves, exports, runs that share a directory
``async_save``, ``ema``                         asynchronous saves and moving averages
``uploads``                                     ``save_total_limit``, and copies in a store
``resume``, ``loading``, ``restore``            the checkpoint to resume, the resume, the states that it creates
``live_roles``, ``optimizers``                  tensors by role; supported optimizers, sharding stage 3
``documents``                                   small files: scheduler, tokenizer, Trainer state, configuration
``position``, ``batches``, ``rng``              position in the data, differences between runs, random states
``description``, ``base_fingerprint``           the live configuration; the base of adapters, failed loads
``pretrained``                                  open weights, adapters; the replaced ``from_pretrained``
``library``                                     the library with the Trainer, and its names
``callback``                                    best checkpoint, log lines and events
``rank_records``                                figures and errors for the starter of the ranks
``stock_keys``                                  keys, types, words and defaults of its command line
``loop``                                        ``save`` and ``load`` without a Trainer
==============================================  ===============================================================
"""
