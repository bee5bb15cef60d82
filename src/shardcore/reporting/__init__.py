"""Results as data, with their tables and pictures, and the log. `api` and `binding` import it."""
