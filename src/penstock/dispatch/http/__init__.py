"""HTTP upstreams: connections, client, what an answer means."""
