"""Reports for people: results as data, their tables and pictures, and the log.

Import the report classes and `logs.configure`; `tables` and the picture modules serve this folder.
"""
