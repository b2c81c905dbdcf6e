"""Who may ask, how much at once, and the end of it: keys, admission, drain."""
