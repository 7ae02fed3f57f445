"""`trocar doctor`: looks at a machine, its configuration and a running server, and says what to do."""

from trocar_server.doctor.finding import Finding, Level
from trocar_server.doctor.running import examine

__all__ = ["Finding", "Level", "examine"]
