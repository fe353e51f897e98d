"""Execute plans: load, save, export, compare, verify. Only access to live tensors needs Paddle.

==============================================  ===============================================================
``save``, ``save_plan``                         snapshot, write, commit; the cached plan of a save
``replicas``                                    assigns replicas to writers; compares replicas and tied tensors
``commit_coordinator``                          one staging directory per disk; the commit on all ranks
``load``, ``opening``                           preflight and read; files visible only to some ranks; checksums
``reading``                                     reads of a plan as operations of the executor
``memory``, ``staging_pool``                    live tensors on the host and on an accelerator
``exchange``                                    ranges that one rank reads or holds for others
``export``, ``export_files``                    exports to other formats; batches of an export
``digest``, ``diff_checkpoints``                md5 of canonical tensors; comparison of two checkpoints
``verify``, ``output_directory``                verification; facts and stale directories of an output directory
==============================================  ===============================================================
"""
