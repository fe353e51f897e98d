"""The integration into PaddleFormers' Trainer: the only package that changes how it saves and resumes.

Without ``flex_checkpoint: true`` everything here calls PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself stays PaddleFormers' own.

Three ways to use it, one implementation (:mod:`.trainer_init`): ``FlexTrainer`` (:mod:`.mixin`) in a script,
:func:`.install.install` for the stock ``Trainer`` class, and ``register.py``, the ``custom_register_path`` of a YAML.

Importing this package imports neither Paddle nor PaddleFormers. :mod:`paddleformers_fc` exports the names for scripts.
"""
