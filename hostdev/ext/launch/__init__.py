"""`hostdev launch`: start the processes that a rank table assigns to this host, or check their connections."""
