"""Communication between the ranks of a job.

====================  =====================================================================================
``communicator``      one object per job: channel, liveness, connection to the store, exit of hung ranks
``store_client``      a connection to the job's store with a bound on every wait
``channel``           typed exchanges; the same error on all ranks
``liveness``          meetings before every exchange, with a timeout
``consistency``       versions, options and configuration compared between ranks
``disk_leaders``      the ranks that share a disk
``rank_format``       many ranks in one line of a report
====================  =====================================================================================
"""
