"""Communication between the ranks of a job.

==================  ==================================================================================
``communicator``    one object per job: channel, liveness, connection to the store, exit of hung ranks
``store_client``    a connection to the job's store with a bound on every wait
``channel``         typed exchanges; the same error on all ranks; many ranks in one line of a report
``liveness``        meetings before every exchange, with a timeout
``consistency``     versions, options and configuration compared between ranks
``step_agreement``  training threads agree at step ends
==================  ==================================================================================
"""
