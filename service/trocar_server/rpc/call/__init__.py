"""Call handling: authorization, drain, status, access log."""
