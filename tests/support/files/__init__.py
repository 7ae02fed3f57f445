"""Files of the repository as tests read them."""
