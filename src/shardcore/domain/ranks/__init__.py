"""The job of this process, and the ranks that are late."""
