"""Worker process that answers with as many bytes as it is asked for."""

from typing import Any

from trocar_server.decoding.worker import serve


def main() -> None:
    """Answer until the input ends."""
    serve(_answer, 1 << 30)


def _answer(head: dict[str, Any], _: bytes) -> tuple[dict[str, Any], list[bytes]]:
    return {"size": head["size"]}, [b"x" * min(head["size"], 1 << 20)]


if __name__ == "__main__":
    main()
