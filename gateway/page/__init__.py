"""The chat page: static files for a browser, which then is a client of the API like any other."""
