"""Files of records: text, JSONL, ArrayRecord; what is wrong with them, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from array_record.python import array_record_module

from piper_jax.config import Config, DataSection, ModelSection, TokenizerSection
from piper_jax.data import open_data
from piper_jax.data.skipping import Skipped
from piper_jax.data.sources import Source, open_source
from piper_jax.errors import DataError

TEXTS = [b"one", "zwölf".encode(), b"", b"three"]


def _array_record(path: Path, records: list[bytes]) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def _opened(*paths: Path, limit: int = 0, **options: str) -> Source:
    return open_source(paths, DataSection.model_validate(options), Skipped(limit=limit))[0]


def _records(source: Source) -> list[bytes]:
    return [source[k] for k in range(len(source))]


def test_records_of_every_format_in_the_order_of_the_files(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": text.decode(), "n": 1}) for text in TEXTS) + "\n \n")
    text = tmp_path / "b.txt"
    text.write_bytes(b"\xff any bytes")
    plain = _array_record(tmp_path / "c.array_record", TEXTS)
    of_json = _array_record(tmp_path / "d.array_record", [json.dumps({"text": t.decode()}).encode() for t in TEXTS])
    source = _opened(lines, text, plain, of_json)
    assert _records(source) == [*TEXTS, b"\xff any bytes", *TEXTS, *TEXTS]
    assert [source.place(k).removeprefix(f"{tmp_path}/") for k in (1, 4, 6)] == [
        "a.jsonl:3",
        "b.txt",
        "c.array_record: record 1",
    ]
    assert json.loads(_opened(of_json, format="array_record")[0]) == {"text": "one"}
    with pytest.raises(DataError, match=r"record 0: the record has no key 'txt'\.\nhelp: set data\.field; did you"):
        _opened(of_json, field="txt")[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13."),
        (b'{"n": ' + b"1" * 5000 + b"}", "JSON that Python does not read: Exceeds the limit"),
        (b"[" * 100000, "JSON that Python does not read: "),
        (b'{"text": "\xff"}', "not UTF-8 text at byte 10."),
        (b'{"txt": "a"}', "the record has no key 'text'.\nhelp: set data.field; did you mean 'txt'?"),
        (b'{"text": 3}', "'text' is a int, no text."),
        (b"[1]", "a JSON list, no object."),
        (b'{"text": "\\ud800"}', "'text' holds half a surrogate pair at character 0."),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    source = _opened(path)
    assert source[0] == b"fine"
    with pytest.raises(DataError) as caught:
        source[1]
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "help: " in str(caught.value)


def test_a_damaged_array_record_is_named_and_may_be_left_out(tmp_path: Path):
    """Flipped bits are found by the checksums of the format, truncated files where they are opened."""
    good = _array_record(tmp_path / "good.array_record", [b"%d " % k * 400 for k in range(30)])
    whole = good.read_bytes()
    used = [at for at, byte in enumerate(whole) if byte]
    found: set[str] = set()
    for at in used[20 :: len(used) // 25]:
        path = tmp_path / f"flip{at}.array_record"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            records = _records(_opened(path))
        except DataError as error:
            found.add(error.what.removeprefix(f"{path}: ").split()[0])
        else:
            assert records == _records(_opened(good))
    assert found == {"record", "no"}
    cut = tmp_path / "cut.array_record"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="no whole ArrayRecord file"):
        _opened(cut)
    assert len(_opened(cut, good, limit=1)) == 30


def test_records_that_are_no_utf8_are_found_where_the_tokenizer_needs_it(tmp_path: Path):
    for name, content in (("a.txt", b"x" * 4000), ("b.txt", b"y\xff"), ("c.txt", b"z" * 4000)):
        (tmp_path / name).write_bytes(content)
    section = DataSection(paths=(f"{tmp_path}/*.txt",), tokenizer=TokenizerSection(kind="bpe", vocab_size=257))
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8 text at byte 1\.\nhelp: convert the file"):
        open_data(Config(data=section))
    model = ModelSection(arguments={"vocab_size": 257})
    data = open_data(Config(data=section.model_copy(update={"on_corrupt": "skip"}), model=model))
    assert list(data.corpus.skipped.reasons) == [f"{tmp_path}/b.txt: not UTF-8 text at byte 1."]


def test_the_text_of_records_is_one_line_each(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"body": "{letter * 3}"}}\n' for letter in "abcd" * 200))
    data = open_data(Config(data=DataSection(paths=(str(path),), field="body", held_out_paths=(str(path),))))
    assert data.train[:8].tobytes() == b"aaa\nbbb\n"
    assert len(data.train) == len(data.held_out) == 3200
    assert "800 lines, 0.0 MB to train on, 0.0 MB held out" in str(data)
