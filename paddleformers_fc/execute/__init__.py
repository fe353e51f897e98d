"""Carry out plans: load, save, export, compare, verify. Everything but live memory works without Paddle.

==============================================  ===============================================================
``save``, ``save_plan``                         snapshot, write, commit; the cached plan of a save
``replicas``                                    the rank that writes each replica; comparison of copies
``commit_coordinator``                          one staging directory per disk; the commit on all ranks
``load``, ``opening``                           preflight and read; files that only some ranks see; checksums
``reading``                                     reads of a plan as operations of the executor
``memory``, ``staging_pool``                    live tensors on the host and on an accelerator
``exchange``                                    ranges that one rank reads or holds for others; replicas
``export``, ``export_files``                    files of another format; memory and reads of an export
``digest``, ``diff_checkpoints``                canonical tensors of a checkpoint, their md5; comparison of two
``verify``, ``output_directory``                checks, facts, leftovers
==============================================  ===============================================================
"""
