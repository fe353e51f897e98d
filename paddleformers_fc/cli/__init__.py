"""The command line ``paddleformers-fc``: ``main`` declares the commands, other modules implement and print them.

=========================================  =====================================================================
``main``                                   commands, options, exit codes
``documents``                              the types of the JSON documents
``inspection``                             ``inspect``, ``list``, ``clean``
``explaining``                             ``explain``, ``aoa``, ``families``
``verification``, ``difference``           ``verify``, ``doctor``; ``diff``
``planning``, ``exporting``                ``plan``; ``export``, ``convert``
``training``                               ``train``: prepares, starts and supervises a job
``settings``, ``start_checks``, ``nodes``  read the YAML, check it before ranks start, jobs of several nodes
=========================================  =====================================================================
"""
