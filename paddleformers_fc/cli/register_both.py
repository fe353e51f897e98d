"""``custom_register_path`` of the ``train`` verb where the YAML has one of its own: that one runs first, then ours."""

from paddleformers_fc.cli.training import register_both

register_both()
