"""Authorization data: scopes, and the file of tokens and certificate names that hold them."""

from trocar_server.auth.grants import Grant, token_hash
from trocar_server.auth.live_grants import Caller, LiveGrants
from trocar_server.auth.scopes import Scope, with_included
from trocar_server.auth.token_file import TokenFile

__all__ = ["Caller", "Grant", "LiveGrants", "Scope", "TokenFile", "token_hash", "with_included"]
