"""The command line: declarations of all commands, and one module per command for its text output.

=========================================  =====================================================================
``main``                                   commands, options, exit codes
``output``                                 JSON, text and errors on the right stream
``inspection``                             ``inspect``: facts of a checkpoint, its tensors
``checkpoints``                            ``list``, ``clean``
``explaining``                             ``explain``, ``aoa``, ``families``
``verification``, ``difference``           ``verify``, ``doctor``; ``diff``
``planning``, ``exporting``                ``plan``; ``export``, ``convert``
``training``                               ``train``: prepares, starts and supervises a job
``settings``, ``start_checks``, ``nodes``  reading of the YAML, checks before ranks start, jobs of several nodes
=========================================  =====================================================================
"""
