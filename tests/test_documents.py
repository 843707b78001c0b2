"""README.md and docs/: links lead somewhere, commands exist, pictures can be shown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools.documents import refreshed
from tools.schemas import READ_FIRST, definitions_in, field_texts, schemas
from tools.tree import Node, command_tree

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
DOCUMENTS = [
    *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((PROJECT / "docs").rglob("*.md")),
    *sorted((PROJECT / "benchmarks" / "results").glob("*.md")),
]
PICTURES = sorted((PROJECT / "docs" / "pictures").glob("*.svg"))
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def anchors(text: str) -> set[str]:
    """Return the anchors that a code host makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _FENCED.sub("", path.read_text())):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


def test_the_index_names_every_page() -> None:
    index = PROJECT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    assert set(DOCUMENTS) & set((PROJECT / "docs").rglob("*.md")) - {index} <= linked


def command_lines(text: str) -> Iterator[str]:
    """Yield each gpushare command of the shell and console blocks, without sudo, prompt and comment."""
    for kind, block in _FENCED.findall(text):
        for line in block.splitlines():
            words = line.removeprefix("$ ").removeprefix("sudo ")
            if (kind == "sh" or line.startswith("$ ")) and words.startswith("gpushare "):
                yield words


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_commands_and_options_exist(path: Path) -> None:
    nodes = {node.path: node for node in command_tree().walk()}
    for line in command_lines(path.read_text()):
        words = [word for word in shlex.split(re.split(r" > | \| ", line)[0], comments=True)[1:] if word != "&"]
        words = words[: words.index("--")] if "--" in words else words
        if words[:1] == ["--host"]:
            words = words[2:]
        node = next(nodes[tuple(words[:length])] for length in (2, 1) if tuple(words[:length]) in nodes)
        assert not node.children, line
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= options(node), (line, used - options(node))


def options(node: Node) -> set[str]:
    return {name for option in node.options for name in option.names}


@pytest.mark.parametrize("heading", ["Try it", "Run the tests"])
def test_the_set_up_commands_are_one_line(heading: str) -> None:
    """As .ci/run reads them: the first fenced block below the heading."""
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    kind, block = _FENCED.findall(section)[0]
    assert (kind, block.count("\n")) == ("sh", 1)


def test_a_stale_output_is_replaced_and_the_rest_kept() -> None:
    text = (
        "before\n```console\n$ gpushare --host sim:t4 sim fault lost -g 0\nold\n```\nbetween\n```sh\ngpushare x\n```\n"
    )
    assert refreshed(text) == text.replace("old", "sim:t4, GPU 0: lost")


def test_a_shortened_output_stays_short() -> None:
    text = (
        "```console\n$ gpushare --host sim:t4 mps start\nold\n...\n$ gpushare --host sim:t4 sim fault lost -g 0\n```\n"
    )
    assert refreshed(text) == text.replace(
        "old", "MPS on GPU 0: no limits; undo: gpushare --host sim:t4 mps stop -g 0"
    ).replace("-g 0\n`", "-g 0\nsim:t4, GPU 0: lost\n`")


@pytest.mark.parametrize(
    "line", ["rm -r x", "gpushare-x", "export", "sudo gpushare status", "gpushare status | head -1"]
)
def test_no_other_program_is_run_for_a_document(line: str) -> None:
    with pytest.raises(ValueError, match="gpushare, cat and export only"):
        refreshed(f"```console\n$ {line}\n```\n")


def test_there_are_pictures() -> None:
    assert [path.stem for path in PICTURES] == ["advise", "bench", "mig-plan", "status", "top"]


@pytest.mark.parametrize("path", PICTURES, ids=named)
def test_a_picture_is_small_and_complete_in_itself(path: Path) -> None:
    text = path.read_text()
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
    assert len(text) < 60_000
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "/tmp" not in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_figures_have_a_digit_before_the_point(path: Path) -> None:
    assert re.findall(r"(?<![\w.*\\:])\.\d+", _FENCED.sub("", path.read_text())) == []


_COMMANDS = re.compile(r"\bgpushare ((?:[^`\"'\n;|,]|\{[^}]*\})+)")


def test_options_in_texts_are_those_of_their_commands() -> None:
    """In the documents, the explanations and the messages: what was renamed must not live on in a hint."""
    nodes = {" ".join(node.path): node for node in command_tree().walk()}
    common = {name for option in nodes[""].options for name in option.names} | {"--help", "--help-all"}
    texts = [
        *PROJECT.glob("*.md"),
        *PROJECT.glob("docs/**/*.md"),
        *PROJECT.glob("gpushare/data/*.yaml"),
        *PROJECT.glob("gpushare/**/*.py"),
    ]
    wrong, seen = set(), 0
    for text in texts:
        for found in _COMMANDS.finditer(text.read_text(encoding="utf-8")):
            words, path = found[1].split(" -- ")[0].split(), ""
            while words and f"{path} {words[0]}".strip() in nodes:
                path = f"{path} {words.pop(0)}".strip()
            # "gpushare export {engine} --to DIR".
            below = nodes[path].children if words and words[0].startswith("{") else ()
            names = {
                name for node in (nodes[path], *below) for option in node.options for name in option.names
            } | common
            options = [option[0] for word in words if (option := re.match(r"--[a-z][a-z0-9-]*", word))]
            seen += len(options)
            wrong |= {
                f"{text.relative_to(PROJECT)}: gpushare {path} {name}" for name in options if path and name not in names
            }
    assert seen > 300
    assert wrong == set()


def test_each_of_the_25_wishes_has_an_answer() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \| (.+) \|$", (PROJECT / "docs" / "wishes.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 26))
    silent = [number for number, _, answer in rows if "`gpushare " not in answer and "`nvidia-smi" not in answer]
    assert silent == []


def test_each_field_of_the_answers_that_scripts_read_first_has_a_text() -> None:
    document = json.loads(schemas())
    names = definitions_in([document["answers"][command] for command in READ_FIRST], document["$defs"])
    fields = {f"{name}.{key}": field for name in names for key, field in document["$defs"][name]["properties"].items()}
    assert [field for field, schema in fields.items() if not schema.get("description")] == []
    # Only a field that can be null says what null means.
    assert [
        name
        for name, field in fields.items()
        if "; null: " in field["description"] and "null" not in json.dumps({**field, "description": ""})
    ] == []
    # No text is left over: of a field that is gone, or that has a comment in its class.
    texts = field_texts()
    every = {f"{name}.{key}" for name, kind in document["$defs"].items() for key in kind["properties"]}
    used = {field["description"] for field in fields.values()} | {
        field.get("description")
        for name, kind in document["$defs"].items()
        for key, field in kind["properties"].items()
        if f"{name}.{key}" in texts
    }
    assert [name for name, text in texts.items() if text not in used] == []
    known = {*every, *(field.partition(".")[2] for field in fields)}
    assert [name for name in texts if name not in known] == []
