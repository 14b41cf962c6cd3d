import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rlhf_core.artifacts import (
    ArtifactError,
    ArtifactRef,
    Recipe,
    Store,
    canonical,
    create_once,
    derive_seed,
    recipe_key,
    replace,
)

NOTES = {"a/b.txt": b"hello"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def commit(store: Store, files: dict[str, bytes], kind: str = "notes", key: str = "k") -> ArtifactRef:
    with store.writing() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return store.commit(folder, kind, key)


def objects(store: Store) -> list[str]:
    return sorted(path.name for path in (store.root / "objects").iterdir())


def recipe(outputs: dict[str, ArtifactRef], key: str = "k", **told: str) -> Recipe:
    return Recipe(
        stage="notes", version=1, key=key, settings={}, seed=0, inputs={}, outputs=outputs, told={**told}
    )


def test_a_committed_artifact_is_opened_with_its_files(store: Store) -> None:
    folder = store.open(commit(store, NOTES))
    assert (folder / "a/b.txt").read_bytes() == b"hello"


def test_the_digest_is_the_sha256_of_the_manifest(store: Store) -> None:
    # hash=$(printf 'hello' | sha256sum | cut -c1-64)
    # printf '{"files":{"a/b.txt":"%s"},"kind":"notes","schema":1}' $hash | sha256sum
    expected = "4cf7839012798ac93bb0829c96ddd1a8f753ca5c937ede121cddf05f9f7991b2"
    assert commit(store, NOTES).digest == expected


def test_the_digest_changes_with_content_name_and_kind_and_not_with_the_key(store: Store) -> None:
    digests = {
        commit(store, NOTES).digest,
        commit(store, {"a/b.txt": b"hallo"}).digest,
        commit(store, {"a/c.txt": b"hello"}).digest,
        commit(store, NOTES, kind="letters").digest,
    }
    assert len(digests) == 4
    assert commit(store, NOTES, key="another").digest in digests


def test_nothing_is_visible_before_the_commit(store: Store) -> None:
    with store.writing() as folder:
        (folder / "a.txt").write_bytes(b"half")
        assert objects(store) == []
        store.commit(folder, "notes", "k")
        assert len(objects(store)) == 1


def test_an_interrupted_writer_leaves_no_artifact(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.writing() as folder:
        (folder / "a.txt").write_bytes(b"half")
        raise KeyboardInterrupt
    assert objects(store) == [] and list((store.root / "tmp").iterdir()) == []


def test_writers_of_equal_content_share_one_artifact(store: Store) -> None:
    num_writers = 8
    together = Barrier(num_writers)

    def write(number: int) -> ArtifactRef:
        with store.writing() as folder:
            (folder / "a.txt").write_bytes(b"equal")
            together.wait()
            return store.commit(folder, "notes", f"key-{number}")

    with ThreadPoolExecutor(num_writers) as pool:
        refs = list(pool.map(write, range(num_writers)))
    assert objects(store) == [refs[0].digest]
    assert {ref.digest for ref in refs} == {refs[0].digest}
    assert [ref.key for ref in refs] == [f"key-{number}" for number in range(num_writers)]
    store.verify(refs[0])
    assert list((store.root / "tmp").iterdir()) == []


def test_a_second_writer_does_not_vouch_for_a_first_artifact_that_was_changed(store: Store) -> None:
    ref = commit(store, NOTES)
    (store.open(ref) / "a/b.txt").write_bytes(b"HELLO!")
    with pytest.raises(ArtifactError, match=r"a/b\.txt"):
        commit(store, NOTES)
    with pytest.raises(ArtifactError, match=r"a/b\.txt"):
        store.open(ref)


def test_an_empty_artifact_is_refused(store: Store) -> None:
    with pytest.raises(ArtifactError, match="needs files"):
        commit(store, {})


def test_a_file_in_the_manifests_place_is_refused(store: Store) -> None:
    with pytest.raises(ArtifactError, match=r"artifact\.json"):
        commit(store, {"artifact.json": b"{}"})


def test_a_link_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.bin").write_bytes(b"may change")
    with pytest.raises(ArtifactError, match=r"weights\.bin"), store.writing() as folder:
        (folder / "weights.bin").symlink_to(tmp_path / "elsewhere.bin")
        store.commit(folder, "notes", "k")
    assert objects(store) == []


CHANGES = {
    "another size": ("a/b.txt", lambda path: path.write_bytes(b"hello!")),
    "another time": ("a/b.txt", lambda path: path.write_bytes(b"jello") and os.utime(path, ns=(1, 1))),
    "a new file": ("c.txt", lambda path: path.write_bytes(b"new")),
    "a file less": ("a/b.txt", Path.unlink),
    "another manifest": ("artifact.json", lambda path: path.write_bytes(b"{}")),
    "no manifest": ("artifact.json", Path.unlink),
}


@pytest.mark.parametrize(("named", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_artifact_is_found_when_it_is_opened(store: Store, named: str, change) -> None:
    ref = commit(store, NOTES)
    change(store.open(ref) / named)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=rf"notes {ref.digest[:12]}.*\({named}\).*Restore"):
            store.open(ref)


def test_a_change_that_hides_its_traces_is_found_by_verify(store: Store) -> None:
    ref = commit(store, NOTES)
    path = store.open(ref) / "a/b.txt"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"jello")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    store.open(ref)  # equal size, time and inode: not hashed again
    with pytest.raises(ArtifactError, match=r"a/b\.txt"):
        store.verify(ref)


def test_a_copied_store_is_verified_anew(store: Store, tmp_path: Path) -> None:
    ref = commit(store, NOTES)
    copy = Store(shutil.copytree(store.root, tmp_path / "copy"))
    path = copy.root / "objects" / ref.digest / "a/b.txt"
    times = path.stat()
    path.write_bytes(b"jello")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ArtifactError, match=r"a/b\.txt"):
        copy.open(ref)


def test_a_missing_artifact_is_named(store: Store) -> None:
    ref = ArtifactRef(kind="policy", digest="0" * 64, key="k")
    with pytest.raises(ArtifactError, match="policy 000000000000 is not in the store"):
        store.open(ref)
    with pytest.raises(ArtifactError, match="policy 000000000000"):
        store.verify(ref)


def test_a_ref_of_another_kind_does_not_verify(store: Store) -> None:
    ref = commit(store, NOTES)
    with pytest.raises(ArtifactError, match=f"policy {ref.digest[:12]}"):
        store.verify(ref.model_copy(update={"kind": "policy"}))


def test_a_recipe_is_created_once_and_adopted(store: Store) -> None:
    ref = commit(store, NOTES)
    first = store.record(recipe({"notes": ref}, host="one"))
    second = store.record(recipe({"notes": commit(store, {"b.txt": b"other"})}, host="two"))
    assert second == first == store.recipe("k")
    assert first.told == {"host": "one"}


def test_a_recipe_whose_files_are_gone_counts_as_not_done_and_is_replaced(store: Store) -> None:
    gone, other = commit(store, NOTES), commit(store, {"b.txt": b"other"})
    store.record(recipe({"notes": gone}))
    shutil.rmtree(store.root / "objects" / gone.digest)
    assert store.recipe("k") is None
    again = store.record(recipe({"notes": other}))
    assert again.outputs == {"notes": other}
    assert store.recipe("k") == again


def test_an_unknown_recipe_is_none(store: Store) -> None:
    assert store.recipe("never") is None


def ref_of(character: str, key: str = "k", kind: str = "policy") -> ArtifactRef:
    return ArtifactRef(kind=kind, digest=character * 64, key=key)


def test_the_key_changes_with_each_ingredient() -> None:
    base = {
        "stage": "rollouts",
        "version": 1,
        "settings": {"a": 1, "b": {"c": 2.0}},
        "inputs": {"policy": ref_of("1"), "prompts": ref_of("2")},
        "seed": 3,
    }
    changes = [
        {},
        {"stage": "pairing"},
        {"version": 2},
        {"settings": {"a": 1, "b": {"c": 2.5}}},
        {"settings": {"a": 1}},
        {"inputs": {"policy": ref_of("2"), "prompts": ref_of("1")}},
        {"inputs": {"policy": ref_of("1")}},
        {"seed": 4},
    ]
    assert len({recipe_key(**(base | change)) for change in changes}) == len(changes)


def test_the_key_does_not_depend_on_order_or_on_how_an_input_was_made() -> None:
    one = recipe_key("s", 1, {"a": 1, "b": 2}, {"x": ref_of("1"), "y": ref_of("2")}, 0)
    two = recipe_key("s", 1, {"b": 2, "a": 1}, {"y": ref_of("2", key="other"), "x": ref_of("1")}, 0)
    assert one == two


def test_canonical_json_by_hand() -> None:
    assert canonical({"b": [1, 0.5, None], "a": "é"}) == '{"a":"é","b":[1,0.5,null]}'.encode()
    with pytest.raises(ValueError):
        canonical(float("nan"))


def test_a_derived_seed_is_the_same_number_for_ever() -> None:
    # printf '["sampling",7,0]' | sha256sum = fae40a1a481f629f...; int("fae40a1a481f629f", 16) // 2
    assert derive_seed("sampling", 7, 0) == 9039292956083728719


def test_derived_seeds_differ_and_fit_a_torch_generator() -> None:
    parts = [(run, stage, step) for run in range(5) for stage in ("a", "ab") for step in range(20)]
    parts += [("1", 2), (1, 2), (12,), ("1,2",), (2, 1)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_create_once_keeps_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert create_once(path, b"first")
    assert not create_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_one_of_many_creators_wins_whole(tmp_path: Path) -> None:
    num_writers = 8
    together = Barrier(num_writers)

    def create(number: int) -> bool:
        together.wait()
        return create_once(tmp_path / "record.json", bytes([number]) * 10_000)

    with ThreadPoolExecutor(num_writers) as pool:
        won = list(pool.map(create, range(num_writers)))
    assert won.count(True) == 1
    assert (tmp_path / "record.json").read_bytes() == bytes([won.index(True)]) * 10_000


def test_replace_puts_a_file_in_anothers_place(tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    for data in (b"one", b"two"):
        replace(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]
