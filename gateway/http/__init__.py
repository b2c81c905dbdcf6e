"""What surrounds every request: routes, records, bodies, streams of server-sent events."""
