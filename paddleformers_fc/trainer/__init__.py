"""The integration into PaddleFormers' Trainer: the only package that changes how it saves and resumes.

Without ``flex_checkpoint: true`` everything here calls PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself stays PaddleFormers' own.

Three ways to use it, one implementation (:mod:`.trainer_init`): ``FlexTrainer`` (:mod:`.mixin`) in a script,
:func:`.install.install` for the stock ``Trainer`` class, and ``register.py``, the ``custom_register_path`` of a YAML.

Importing this package imports neither Paddle nor PaddleFormers. :mod:`paddleformers_fc` exports the names for scripts.

======================================================  ================================================================
``options``, ``arguments``, ``cli_arguments``           the options, and the argument classes that contain them
``install``, ``mixin``, ``register``                    the three ways in
``trainer_init``, ``job_state``, ``preflight``          construction, state of one job, checks before the first step
``saving``, ``rotation``, ``lineage``                   save, ``save_total_limit``, runs that share a directory
``resume``, ``loading``                                 the checkpoint to resume, and the resume itself
``live_roles``, ``sharding_stage3``, ``optimizers``     tensors by role; sharding stage 3; supported optimizers
``documents``                                           small files: scheduler, tokenizer, Trainer state
``position``, ``batches``, ``rng``                      position in the data, random states
``changes``, ``description``, ``pretrained_documents``  differences between runs; the live configuration
``open_weights_reader``, ``pretrained``                 open weights
``loader_patches``, ``weight_source``                   models that PaddleFormers' loader filled
``best``, ``bypass``, ``callback``                      best checkpoint, overridden methods, log lines and events
``rank_records``, ``progress_recorder``                 figures and errors for the starter of the ranks
``stock_keys``                                          keys, types and words of PaddleFormers' command line
``loop``                                                ``save`` and ``load`` without a Trainer
======================================================  ================================================================
"""
