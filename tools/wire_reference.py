"""Reference of the wire: a page for each .proto file, from its descriptors and the comments in it.

.venv-docs/bin/python -m tools.wire_reference     # prints the pages; the site takes them as they are
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTO = Path(__file__).parents[1] / "proto"
PACKAGE = "trocar_api.v1"

_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # numbers of fields in descriptor.proto, of which paths are made
_FIELDS, _NESTED, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2
_SYNTAX = 12

Place = tuple[int, ...]
"""Where a declaration is in its file: numbers of fields and indices."""


def descriptors() -> FileDescriptorSet:
    """Return the descriptors of the wire contract, with the comments of their sources."""
    with tempfile.NamedTemporaryFile() as file:
        sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
        options = ("-I.", f"--descriptor_set_out={file.name}", "--include_source_info")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *sources], cwd=PROTO, check=True)
        return FileDescriptorSet.FromString(Path(file.name).read_bytes())


def wire_pages() -> Iterator[tuple[str, str, str]]:
    """Yield file name, title and Markdown for the list of services, then for each .proto file."""
    result = descriptors()
    places = _places(result)
    files = sorted((Proto(file, places) for file in result.file), key=lambda file: file.stem)
    yield "index.md", "Overview", _overview(files)
    for file in files:
        yield f"{file.stem}.md", f"{file.stem}.proto", file.page()


def _places(outcome: FileDescriptorSet) -> dict[str, str]:
    """Return the page of each message and enum, by full name."""
    return {
        f".{PACKAGE}.{name}": f"{Path(file.name).stem}.md#{name}"
        for file in outcome.file
        for kinds in (file.message_type, file.enum_type)
        for name in _names(kinds)
    }


def _names(
    kinds: Sequence[DescriptorProto] | Sequence[EnumDescriptorProto], within: str = ""
) -> Iterator[str]:
    for kind in kinds:
        yield f"{within}{kind.name}"
        if isinstance(kind, DescriptorProto):
            yield from _names(kind.nested_type, f"{within}{kind.name}.")
            yield from _names(kind.enum_type, f"{within}{kind.name}.")


class Proto:
    """One .proto file as Markdown."""

    def __init__(self, file: FileDescriptorProto, places: dict[str, str]) -> None:
        self.file, self.stem = file, Path(file.name).stem
        self._places = places
        self._comments: dict[Place, str] = {}
        for location in file.source_code_info.location:
            text = "\n".join(
                filter(None, [location.leading_comments.strip(), location.trailing_comments.strip()])
            )
            detached = [part.strip() for part in location.leading_detached_comments]
            self._comments[tuple(location.path)] = text or "\n\n".join(detached)

    def comment(self, *path: int) -> str:
        """Return the comment at a path of descriptor.proto's numbers, as Markdown."""
        return _prose(self._comments.get(path, ""))

    def page(self) -> str:
        """Return the whole page."""
        lines = [f"# {self.stem}.proto", self.comment(_SYNTAX)]
        for index, service in enumerate(self.file.service):
            lines += self._service(service, (_SERVICES, index))
        for index, message in enumerate(self.file.message_type):
            lines += self._message(message, (_MESSAGES, index), "")
        for index, kind in enumerate(self.file.enum_type):
            lines += self._enum(kind, (_ENUMS, index), "")
        return "\n\n".join(line for line in lines if line) + "\n"

    def _service(self, service: ServiceDescriptorProto, path: Place) -> Iterator[str]:
        yield _heading(2, service.name)
        yield self.comment(*path)
        for index, method in enumerate(service.method):
            yield _heading(3, method.name, f"{service.name}.{method.name}")
            sent = ("stream " if method.client_streaming else "") + self._link(method.input_type)
            got = ("stream " if method.server_streaming else "") + self._link(method.output_type)
            yield f"takes {sent}, returns {got}"
            yield self.comment(*path, _METHODS, index)

    def _message(self, message: DescriptorProto, path: Place, within: str) -> Iterator[str]:
        name = f"{within}{message.name}"
        if message.options.map_entry:
            return
        yield _heading(2, name)
        yield self.comment(*path)
        if message.field:
            yield "\n".join(self._fields(message, path))
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, _NESTED, index), f"{name}.")
        for index, kind in enumerate(message.enum_type):
            yield from self._enum(kind, (*path, _NESTED_ENUMS, index), f"{name}.")

    def _fields(self, message: DescriptorProto, path: Place) -> Iterator[str]:
        yield "| field | type | number | meaning |\n|---|---|---|---|"
        for index, field in enumerate(message.field):
            meaning = self.comment(*path, _FIELDS, index)
            if field.HasField("oneof_index") and not field.proto3_optional:
                meaning = f"One of `{message.oneof_decl[field.oneof_index].name}`. {meaning}"
            yield f"| `{field.name}` | {self._type(message, field)} | {field.number} | {_cell(meaning)} |"

    def _type(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        entry = next(
            (kind for kind in message.nested_type if field.type_name.endswith(f".{kind.name}")), None
        )
        if entry is not None and entry.options.map_entry:
            key, value = (self._type(entry, part) for part in entry.field)
            return f"map of {key} to {value}"
        name = self._link(field.type_name) if field.type_name else f"`{_scalar(field)}`"
        repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
        return f"repeated {name}" if repeated else f"optional {name}" if field.proto3_optional else name

    def _enum(self, kind: EnumDescriptorProto, path: Place, within: str) -> Iterator[str]:
        yield _heading(2, f"{within}{kind.name}")
        yield self.comment(*path)
        rows = [
            f"| `{value.name}` | {value.number} | {_cell(self.comment(*path, _VALUES, index))} |"
            for index, value in enumerate(kind.value)
        ]
        yield "\n".join(["| value | number | meaning |\n|---|---|---|", *rows])

    def _link(self, type_name: str) -> str:
        shown = type_name.removeprefix(f".{PACKAGE}.").removeprefix(".")
        place = self._places.get(type_name)
        return f"[`{shown}`]({place})" if place else f"`{shown}`"


def _overview(files: Sequence[Proto]) -> str:
    lines = [
        "# The wire",
        "The protocol between client and server, generated from the `.proto` files in `proto/trocar_api/v1`. "
        f"The package is `{PACKAGE}`. Fields and methods are added, never changed or removed. Errors carry a "
        "[reason](../extracting.md#errors). Clients of Triton and KServe use "
        "[another protocol](../open-inference.md).",
        "| service | methods |\n|---|---|",
    ]
    rows = [_service_row(service, f"{file.stem}.md") for file in files for service in file.file.service]
    rest = [
        f"- [{file.stem}.proto]({file.stem}.md): {file.comment(_SYNTAX).splitlines()[0]}" for file in files
    ]
    return "\n\n".join([*lines[:2], "\n".join([lines[2], *rows]), "\n".join(rest)]) + "\n"


def _service_row(service: ServiceDescriptorProto, page: str) -> str:
    methods = [f"[{method.name}]({page}#{service.name}.{method.name})" for method in service.method]
    return f"| [{service.name}]({page}#{service.name}) | {', '.join(methods)} |"


def _heading(level: int, text: str, anchor: str = "") -> str:
    return f"{'#' * level} {text} {{ #{anchor or text} }}"


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _prose(comment: str) -> str:
    """Return a comment as Markdown: outside of backticks, no sign means anything."""
    paragraphs = re.split(r"\n\s*\n", comment)
    joined = "\n\n".join(" ".join(line.strip() for line in part.splitlines()) for part in paragraphs)
    pieces = re.split(r"(`[^`]*`)", joined)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([*_\[\]<>])", r"\\\1", piece) for piece in pieces
    ).strip()


def _cell(text: str) -> str:
    return text.replace("\n\n", "<br>").replace("|", r"\|")


if __name__ == "__main__":
    for _, _, page in wire_pages():
        print(page)
