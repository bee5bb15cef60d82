"""The start of a job: its store, the name of this start, and what keeps ranks from meeting.

`job.process_group` imports it.
"""
