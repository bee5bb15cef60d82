"""A small checkpoint, and the ways in which a forger changes its index, headers and shards.

Each way returns a name for the kind of change that it has made.
"""

import hashlib
import json
import os
import socket
from copy import deepcopy

import numpy as np

from shardcore.adapters.checkpoints import folders, safetensors
from shardcore.domain.checkpoints.file_format import header_of
from shardcore.domain.checkpoints.grid import Grid
from shardcore.domain.checkpoints.index import Index, StoredVariable

FILES = ("rank-00000.safetensors", "rank-00001.safetensors")
VALUES = [
    *(None, True, -1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**63, 2**70, 10**4000, -(10**4000), 0.5),
    *(float("nan"), float("inf"), "", "..", "/etc/passwd", "float64", "x" * 10**5, "\ud800"),
    *("\x1b[31m\x1b]0;owned\x07", "a\u202eb", "\x00", [], {}, [0], [[0]], [0] * 10**5),
    *([2**40, 2**40], [10**4000], [1] * 65, {"a": 1}, {"": {}}, [[[[[]]]]], [None]),
]


# What is no regular file.
SPECIAL = {
    "pipe": "a pipe",
    "zero": "a link to /dev/zero",
    "random": "a link to /dev/urandom",
    "tty": "a link to /dev/tty",
    "folder": "a folder",
    "socket": "a socket",
    "dangling": "a link to nothing",
    "loop": "a link to itself",
}
# What takes memory or time where it is parsed, by the numbers of `be_large`.
LARGE = (
    "a header of empty lists",
    "a header of nested lists",
    "a header of 200,000 equal names",
    "100,000 equal variables",
    "100,000 equal files",
    "a shape of a hundred numbers of 4,000 digits",
    "nested lists in the state",
    "nested lists in the state, with a checksum that fits",
    "an index of a tebibyte",
    "a variable of 100,000 pieces",
)


def deep(depth):
    """Returns lists that are nested so deep, as a text."""
    return "[" * depth + "]" * depth


def make(folder):
    """Writes a checkpoint of two files."""
    folder.mkdir()
    contents = [[], []]
    variables = []
    for number, (dtype, shape, cuts) in enumerate(
        (
            ("float32", (6, 4), ((0, 3), (0,))),
            ("bfloat16", (4, 6), ((0,), (0, 2))),
            ("int8", (5,), ((0,),)),
            ("float32", (), ()),
            ("float64", (0, 3), ((0,), (0,))),
            ("uint8", (2, 2, 2), ((0, 1), (0,), (0, 1))),
        )
    ):
        grid = Grid(shape, cuts)
        files = tuple(place % 2 for place in range(int(np.prod(grid.counts, dtype=int))))
        name, path = f"layers/dense_{number}/vars/0", f"net/dense_{number}/kernel"
        variable = StoredVariable(name, path, "model", dtype, "(None)", grid, files)
        variables.append(variable)
        width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        for file, box in zip(files, grid.boxes(), strict=True):
            data = memoryview(bytes(range(box.elements * width)))
            contents[file].append((variable.key(box), dtype, box.shape, data))
    written = [
        safetensors.write(folder / name, header_of(p[:3] for p in parts), (p[3] for p in parts))
        for name, parts in zip(FILES, contents, strict=True)
    ]
    versions, state = {"keras": "3.15.1"}, {"user": {"epoch": 3}, "generators": {"cpu": "00"}}
    index = Index(1, "(model=2)", versions, tuple(variables), tuple(written), state)
    folders.write_index(folder, index)


def sign(folder, found):
    """Writes an index with a checksum that fits, as a forger would."""
    text = json.dumps(found["content"], sort_keys=True, separators=(",", ":"))
    found["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "index.json").write_text(json.dumps(found))


def sign_file(folder, name):
    """Gives the index the size and the checksum of a file."""
    found = json.loads((folder / "index.json").read_text())
    content = (folder / name).read_bytes()
    for file in found["content"]["files"]:
        if file["name"] == name:
            file |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sign(folder, found)


def field_of(names):
    """Returns the field of an index or header to which the names of nested keys lead."""
    if not names:
        return "a list"
    if names[0] in ("variables", "files"):
        return f"{names[0]}: {names[1]}" if len(names) > 1 else f"the list of {names[0]}"
    return names[0]


def change(content, rng):
    """Changes a value in nested lists and dicts; returns the keys of dicts that lead to it."""
    at, names = content, []
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        names += [key] if isinstance(key, str) else []
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.15:
            break
        at = at[key]
    kind = rng.random()
    if kind < 0.15:
        del at[key]
    elif kind < 0.3:
        at[key] = deepcopy(at[rng.choice(keys)])
    elif kind < 0.4 and isinstance(at, dict):
        at[rng.choice([each for each in VALUES if isinstance(each, str)])] = at.pop(key)
    elif kind < 0.5 and type(at[key]) is int:
        at[key] += rng.choice([-1, 1, 2**20, -(2**20), 2**62])
    else:
        at[key] = deepcopy(rng.choice(VALUES))  # a later change may be inside
    return names


def forge_index(folder, rng):
    found = json.loads((folder / "index.json").read_text())
    content, times = found["content"], rng.randint(1, 3)
    fields = [field_of(change(content, rng)) for _ in range(times) if content]
    sign(folder, found)
    return f"forged index: {fields[0] if len(fields) == 1 else 'two or three fields'}"


def forge_frame(folder, rng):
    """Changes the fields around the content."""
    found = json.loads((folder / "index.json").read_text())
    names = change(found, rng)
    (folder / "index.json").write_text(json.dumps(found))
    return f"forged frame of the index: {names[0]}"


def forge_header(folder, rng):
    name = rng.choice(FILES)
    content = (folder / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, times = json.loads(content[8 : 8 + length]), rng.randint(1, 3)
    changed = [change(header, rng) for _ in range(times) if header]
    fields = [names[1] if len(names) > 1 else "a tensor" for names in changed]
    put_header(folder, name, json.dumps(header).encode())
    return f"forged header of a shard: {fields[0] if len(fields) == 1 else 'two or three fields'}"


def put_header(folder, name, text):
    content = (folder / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    sign_file(folder, name)


def forge_length(folder, rng):
    name = rng.choice(FILES)
    content = bytearray((folder / name).read_bytes())
    content[rng.randrange(8)] = rng.randrange(256)
    (folder / name).write_bytes(content)
    sign_file(folder, name)
    return "forged length of a header"


def damage(folder, rng):
    """Changes bytes anywhere; of a shard it fits the checksum to them, or not."""
    file = rng.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    content = content[: rng.choice([len(content), rng.randrange(len(content))])]
    file.write_bytes(content + rng.randbytes(rng.choice([0, 0, 1, 64])))
    if file.suffix == ".json":
        return "other bytes in the index"
    if rng.random() < 0.3:
        return "other bytes in a shard"
    sign_file(folder, file.name)
    return "other bytes in a shard, with a checksum that fits"


def be_special(folder, rng):
    """Puts something that is no regular file into the place of one."""
    file = rng.choice(sorted(folder.iterdir()))
    if file.suffix != ".json":  # of no bytes, as a pipe seems to have
        found = json.loads((folder / "index.json").read_text())
        for stored in found["content"]["files"]:
            stored["size"] = 0 if stored["name"] == file.name else stored["size"]
        sign(folder, found)
    file.unlink()
    kind = rng.choice(sorted(SPECIAL))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        here = os.open(folder, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:  # its path may be too long
            listener.bind(f"/proc/self/fd/{here}/{file.name}")
        os.close(here)
    else:
        places = {"zero": "/dev/zero", "random": "/dev/urandom", "tty": "/dev/tty"}
        file.symlink_to(places.get(kind, file if kind == "loop" else folder / "nothing"))
    what = "the index" if file.suffix == ".json" else "a shard"
    return f"in place of {what}: {SPECIAL[kind]}"


def be_large(folder, rng):
    """Writes what takes memory or time where it is parsed."""
    found = json.loads((folder / "index.json").read_text())
    content = found["content"]
    kind = rng.randrange(len(LARGE))
    name = rng.choice(FILES)
    megabytes = rng.choice([1, 8, 90])
    if kind == 0:
        put_header(folder, name, b'{"a":[' + b"[]," * (megabytes * 2**20 // 3) + b"[]]}")
    elif kind == 1:
        put_header(folder, name, b"[" * megabytes * 2**19 + b"]" * megabytes * 2**19)
    elif kind == 2:
        one = b'"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},'
        put_header(folder, name, b"{" + one * 10**5 + one[:-1] + b"}")
    elif kind == 3:
        content["variables"] = content["variables"][:1] * 10**5
        sign(folder, found)
    elif kind == 4:
        content["files"] = content["files"][:1] * 10**5
        sign(folder, found)
    elif kind == 5:
        content["variables"][0]["shape"] = [10**4000] * 100
        sign(folder, found)
    elif kind == 6:
        text = json.dumps(found)
        depth = rng.choice([30, 200, 900, 10**5])
        (folder / "index.json").write_text(text.replace('{"epoch": 3}', deep(depth)))
    elif kind == 7:
        state = json.loads(deep(rng.choice([30, 70, 300])))
        content["state"]["user"] = {"a": state}
        sign(folder, found)
    elif kind == 8:
        with (folder / "index.json").open("r+b") as file:
            file.truncate(2**40)
    else:
        content["variables"][0]["cuts"] = [list(range(10**5)), [0]]
        content["variables"][0]["files"] = [0] * 10**5
        sign(folder, found)
    return f"large: {LARGE[kind]}"


WAYS = (
    *(forge_index,) * 8,
    *(forge_header,) * 6,
    *(forge_frame, forge_length, damage, damage, be_special, be_special),
)
