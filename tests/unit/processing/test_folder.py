"""Digest of a processor's files: it changes with every file that changes what the processor makes."""

import json
from pathlib import Path

import pytest

from trocar_server.errors import ServiceError
from trocar_server.processing.folder import processor_digest


def test_where_a_sentence_folder_cuts_texts_is_part_of_the_digest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = {processor_digest(tmp_path)}
    for count in (128, 256):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": count}))
        found.add(processor_digest(tmp_path))
    assert len(found) == 3


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": ')
    with pytest.raises(ServiceError, match="sentence_bert_config"):
        processor_digest(tmp_path)
