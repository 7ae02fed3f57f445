"""`trocar doctor`: diagnoses a machine, its configuration and a running server, and recommends actions."""

import trocar_server.app  # noqa: F401 - says where the server does not run
from trocar_server.doctor.finding import Finding, Level
from trocar_server.doctor.running import examine

__all__ = ["Finding", "Level", "examine"]
