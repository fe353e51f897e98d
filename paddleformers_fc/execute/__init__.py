"""Carry out plans: load, save, export, compare, verify. Everything but live memory works without Paddle.

=====================================================  ================================================================
``save``, ``save_plan``                                snapshot, write, commit; the cached plan of a save
``replica_assignment``, ``replicas``, ``ties``         the rank that writes each replica; comparison of copies
``staging_directory``, ``commit_coordinator``          one staging directory per disk; the commit on all ranks
``load``, ``opening``                                  preflight and read; files that only some ranks see
``reading``, ``read_jobs``, ``read_pool``              reads of a plan as jobs of threads
``memory``, ``device``                                 live tensors on the host and on an accelerator
``redistribute``                                       ranges that one rank reads for others
``collective_checksums``                               ``flex_verify`` of a load
``export``, ``export_files``, ``export_batches``       files of another format; memory and reads of an export
``weights_md5``                                        md5 of exported weights
``digest``, ``diff_checkpoints``                             canonical tensors of a checkpoint; comparison of two
``verify``, ``inspect``, ``output_directory``          checks, facts, leftovers
=====================================================  ================================================================
"""
