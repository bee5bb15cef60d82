"""The job: its process group, its store, the exchange of values, and ranks that are forked."""
