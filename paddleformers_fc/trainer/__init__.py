"""The seam to PaddleFormers' Trainer: the only place that changes what it does when it saves or resumes.

Without ``flex_checkpoint: true`` everything here hands over to PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself stays PaddleFormers' own.

Three ways in, one implementation (:mod:`.seam`): ``FlexTrainer`` (:mod:`.mixin`) in a script, :func:`.install.install`
for the stock ``Trainer`` class, and the file ``register.py``, which a YAML names as its ``custom_register_path``.

Importing this package imports neither Paddle nor PaddleFormers; the facade, :mod:`paddleformers_fc`, exports what a
script needs.
"""
