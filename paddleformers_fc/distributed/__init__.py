"""Communication between the ranks of a job: channel, liveness, consistency, disk leaders."""
