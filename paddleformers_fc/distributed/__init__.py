"""Communication between the ranks of a job.

==================  ==================================================================================
``communicator``    one object per job: channel, a barrier with a timeout before every exchange; ends hung ranks
``store_client``    a connection to the job's store with a timeout on every wait
``channel``         typed exchanges that raise the same error on all ranks; ranks formatted for reports
``consistency``     compares versions, options and configuration between ranks
``step_agreement``  lets ranks agree at step ends without collectives
==================  ==================================================================================
"""
