"""``custom_register_path`` of ``train`` for a YAML that has its own: this module runs the YAML's file, then ours."""

from paddleformers_fc.cli.training import register_both

register_both()
