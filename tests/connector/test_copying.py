"""Copying: the same bytes whatever copies them, nothing beside them, and no address from a wrong number."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvhost_connector.copying
from kvhost_connector import native, stats
from kvhost_connector.config import CopyBy
from kvhost_connector.copying import KEPT_BYTES, Copier, NativeCopier, NumpyCopier, choose_copier
from kvhost_connector.metadata import WorkerReport
from kvhost_connector.native import Kernel, Native, NativeMissing, library_path, load_native
from kvhost_connector.pages import Bytes, Numbers, PageTable, Spans
from kvhost_connector.spec import KVHostSpec
from kvhost_connector.worker import HostWorker
from tests.connector.caches import Cache, interleaved, layered, scattered, two_groups
from tests.support.patterns import pat

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(native.__file__).with_suffix(".c")
GUARD = 96


COMPILER = shutil.which("cc") or shutil.which("gcc")
compiled = pytest.mark.skipif(COMPILER is None, reason="this machine has no C compiler")


@pytest.fixture(scope="module")
def built() -> Native:
    """The library as `make setup` built it."""
    assert library_path() is not None, "a C compiler is there but no compiled copying: run make setup"
    return load_native()


def kernels(built: Native) -> list[Kernel]:
    return [kernel for kernel in Kernel if kernel <= built.kernel]


def numbers(*each: int) -> Numbers:
    return np.array(each, dtype=np.int64)


def patterned(size: int, salt: int) -> Bytes:
    """Bytes at an address that begins a line."""
    backing = np.empty(size + 64, dtype=np.uint8)
    start = -backing.ctypes.data % 64
    backing[start : start + size] = np.frombuffer(pat("copying", salt, size), dtype=np.uint8)
    return backing[start : start + size]


def copy_ranges(library: Native, to: Numbers, of: Numbers, sizes: Numbers, kernel: Kernel) -> None:
    """Ranges of any size from anywhere to anywhere: the spans of one block, whose image begins at 0; and the
    other way round, whose pages begin there."""
    none = np.zeros_like(to)
    before = [ctypes.string_at(int(at), int(size)) for at, size in zip(to, sizes, strict=True)]
    library.copy("store", Spans(of, none, to, sizes), numbers(0), numbers(0), kernel)
    after = [ctypes.string_at(int(at), int(size)) for at, size in zip(to, sizes, strict=True)]
    for at, old in zip(to, before, strict=True):
        ctypes.memmove(int(at), old, len(old))
    library.copy("load", Spans(to, none, of, sizes), numbers(0), numbers(0), kernel)
    assert [ctypes.string_at(int(at), int(size)) for at, size in zip(to, sizes, strict=True)] == after


# Sizes around lines, around what is worth the lanes, and pages.
SIZES = st.one_of(
    st.sampled_from([0, 1, 31, 32, 63, 64, 65, 511, 512, 513, 575, 4096, 16384, 65536]),
    st.integers(0, 3000),
    st.integers(4000, 20_000),
)
RANGES = st.lists(st.tuples(SIZES, st.integers(0, 130), st.integers(0, 130)), max_size=24)


@compiled
@settings(deadline=None)  # the machine may be busy
@given(RANGES, st.randoms(use_true_random=False))
def test_every_kernel_copies_what_numpy_copies_and_nothing_beside_it(ranges, chance) -> None:  # type: ignore[no-untyped-def]
    library = load_native()
    # Ranges of any size at any address, in any order; what lies between the destinations must stay.
    to, of, cursor_to, cursor_of = [], [], GUARD, GUARD
    for size, gap_to, gap_of in ranges:
        to.append(cursor_to + gap_to)
        of.append(cursor_of + gap_of)
        cursor_to, cursor_of = to[-1] + size, of[-1] + size
    order = list(range(len(ranges)))
    chance.shuffle(order)
    source = patterned(cursor_of + GUARD, 1)
    before = patterned(cursor_to + GUARD, 2)
    wanted = before.copy()
    for n in order:
        wanted[to[n] : to[n] + ranges[n][0]] = source[of[n] : of[n] + ranges[n][0]]
    sizes = np.array([ranges[n][0] for n in order], dtype=np.int64)
    for kernel in kernels(library):
        target = patterned(len(before), 2)
        copy_ranges(
            library,
            np.array([target.ctypes.data + to[n] for n in order], dtype=np.int64),
            np.array([source.ctypes.data + of[n] for n in order], dtype=np.int64),
            sizes,
            kernel,
        )
        assert np.array_equal(target, wanted), kernel
        assert np.array_equal(source, patterned(len(source), 1))


@compiled
def test_ranges_of_very_unequal_sizes_are_copied_side_by_side(built: Native) -> None:
    sizes = [1 << 20, 1, 600, 100_000, 0, 4096, 513, 1 << 19, 64, 777_777]
    starts = np.cumsum([7, *(size + 13 for size in sizes)])
    source = patterned(int(starts[-1]) + GUARD, 3)
    for kernel in kernels(built):
        target = patterned(len(source), 4)
        wanted = target.copy()
        for start, size in zip(starts, sizes, strict=False):
            wanted[start : start + size] = source[start : start + size]
        copy_ranges(
            built,
            target.ctypes.data + starts[:-1].astype(np.int64),
            source.ctypes.data + starts[:-1].astype(np.int64),
            np.array(sizes, dtype=np.int64),
            kernel,
        )
        assert np.array_equal(target, wanted), kernel


@compiled
def test_lists_that_are_not_lists_of_addresses_are_refused(built: Native) -> None:
    good = np.zeros(2, dtype=np.int64)
    spans = Spans(good, good, good, good)
    for wrong in (
        np.zeros(3, dtype=np.int64),
        np.zeros(2, dtype=np.int32),
        np.zeros((4,), dtype=np.int64)[::2],
    ):
        for arrays in ((wrong, good), (good, wrong)):
            with pytest.raises(ValueError, match="contiguous int64 arrays of one length"):
                built.copy("store", spans, *arrays)
        for place in range(4):
            fields = [wrong if number == place else good for number in range(4)]
            with pytest.raises(ValueError, match="contiguous int64 arrays of one length"):
                Spans(*fields)


@compiled
def test_a_kernel_that_the_processor_lacks_is_refused(built: Native) -> None:
    built = load_native()
    built.kernel = Kernel.PLAIN
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="has no AVX2; its best is PLAIN"):
        built.copy("load", Spans(none, none, none, none), none, none, Kernel.AVX2)


# Blocks and images.

LAYOUTS: dict[str, Callable[[], Cache]] = {
    "layered": layered,
    "large pages": lambda: layered(5, page=4096 + 64),
    "one layer": lambda: layered(1, page=40_000),
    "gaps between layers": lambda: layered(3, gap=24),
    "padded pages": lambda: layered(3, page=2048, padding=16),
    "odd pages": lambda: layered(3, page=1037),
    "interleaved": lambda: interleaved(4, page=700),
    "scattered": scattered,
    "two groups": two_groups,
}
MAKE: dict[str, Callable[[], Copier]] = {"native": lambda: NativeCopier(load_native()), "numpy": NumpyCopier}
COPIERS = [pytest.param("native", marks=compiled), "numpy"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copier", COPIERS)
def test_blocks_come_back_bit_exact_and_nothing_else_is_touched(copier: str, layout: str) -> None:
    copies, cache = MAKE[copier](), LAYOUTS[layout]()
    cache.fill()
    table = PageTable.of(cache.canonical)
    for number, group in enumerate(table.groups):
        blocks, size = numbers(5, 1, 6), group.block_bytes
        place = size + 24
        images, before_store = patterned(3 * place, 5), patterned(3 * place, 5)
        at = images.ctypes.data + numbers(2, 0, 1) * place
        copies.copy(group, "store", blocks, at)
        for block, n in zip(blocks, (2, 0, 1), strict=True):
            assert images[n * place :][:size].tobytes() == cache.image(number, block)
            gap = slice(n * place + size, (n + 1) * place)
            assert np.array_equal(images[gap], before_store[gap])
        wanted = [cache.image(number, block) for block in blocks]
        before = {(t, b): cache.page(t, b).tobytes() for t in range(len(cache.tensors)) for b in range(8)}
        copies.copy(group, "load", numbers(2, 7, 3), at)
        touched = dict(cache.groups[number])
        assert [cache.image(number, block) for block in (2, 7, 3)] == wanted
        for (tensor, block), old in before.items():
            kept = touched.get(tensor, 0) if block in (2, 7, 3) else 0
            assert cache.page(tensor, block).tobytes()[kept:] == old[kept:]
        cache.fill()


@pytest.mark.parametrize("copier", COPIERS)
def test_large_loads_are_as_right_as_small_ones(copier: str) -> None:
    """Those above `KEPT_BYTES` go past the caches."""
    copies, cache = MAKE[copier](), layered(8, page=65536)
    cache.fill()
    group = PageTable.of(cache.canonical).groups[0]
    assert 6 * group.block_bytes > KEPT_BYTES
    images = patterned(6 * group.block_bytes, 6)
    at = images.ctypes.data + numbers(*range(6)) * group.block_bytes
    copies.copy(group, "load", numbers(7, 6, 5, 4, 3, 2), at)
    assert b"".join(cache.image(0, block) for block in (7, 6, 5, 4, 3, 2)) == images.tobytes()


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("wrong", [[8], [3, -1], [1, 1 << 40]])
def test_no_address_is_made_from_a_block_that_does_not_exist(copier: str, wrong: list[int]) -> None:
    cache = layered()
    group = PageTable.of(cache.canonical).groups[0]
    with pytest.raises(IndexError, match="blocks 0 to 7 exist"):
        MAKE[copier]().copy(group, "store", numbers(*wrong), numbers(*wrong))


def test_pages_without_gaps_are_one_span() -> None:
    assert len(PageTable.of(layered(5).canonical).groups[0].spans.bytes) == 5
    together = PageTable.of(interleaved(5).canonical).groups[0].spans
    assert together.bytes.tolist() == [5 * 64]


# Which one copies.


@compiled
def test_auto_takes_the_compiled_copying_and_names_the_processor(built: Native) -> None:
    assert choose_copier(CopyBy.AUTO).name == choose_copier(CopyBy.NATIVE).name
    assert choose_copier(CopyBy.AUTO).name == f"native-{built.kernel.name.lower()}"
    assert choose_copier(CopyBy.NUMPY).name == "numpy"


def test_without_the_compiled_copying_auto_says_so_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_NAME", "_never_built")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, kvhost_connector.copying.logger.name):
        assert choose_copier(CopyBy.AUTO).name == "numpy"
    assert "at about half the speed" in caplog.text
    assert "install kvhost again on a machine with a C compiler" in caplog.text
    with pytest.raises(NativeMissing, match="installed without its compiled copying: install kvhost again"):
        choose_copier(CopyBy.NATIVE)


def get_worker(copy: str) -> HostWorker:
    """What an engine with this setting gets."""
    spec = SimpleNamespace(
        extra_config={"copy": copy}, shard_rank=3, blocks_per_chunk=1, pinning=None, source=None
    )
    worker = KVHostSpec.get_worker(spec, layered().canonical)
    assert isinstance(worker, HostWorker)
    return worker


def test_a_worker_says_what_copies(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.kvhost"):
        worker = get_worker("numpy")
    assert worker.copies_by == "numpy"
    assert caplog.text.count("blocks are copied by numpy, 2 threads") == 1
    report = WorkerReport(3, b"token", 192, "[]", "[]", "cpu", "host", copies_by=worker.copies_by)
    assert stats.count_workers([report], {}) == {(stats.WORKERS, ("host", "host", "numpy")): 1}


def test_a_worker_without_what_it_is_asked_for_runs_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_NAME", "_never_built")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    worker = get_worker("native")
    assert "installed without its compiled copying" in worker.problem
    assert caplog.text.count("this worker runs without the cache: kvhost was installed without") == 1


def test_a_file_that_is_not_the_library_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.so").write_bytes(b"no library")
    with pytest.raises(NativeMissing, match="cannot be loaded"):
        load_native(tmp_path / "wrong.so")


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

/* Each range has its own allocation: a byte read or written beside one is seen. They are the spans of one
 * block, whose pages and image begin at 0. */
int main(void)
{
    enum { RANGES = 23 };
    char *to[RANGES], *from[RANGES];
    int64_t starts_to[RANGES], starts_from[RANGES], bytes[RANGES], none[RANGES] = {0};
    for (int kernel = 0; kernel <= kvhost_best_kernel(); kernel++) {
        for (unsigned turn = 0; turn < 60; turn++) {
            size_t count = turn % RANGES;
            for (size_t i = 0; i < count; i++) {
                bytes[i] = (turn * 977 + i * 6151) % (i % 3 ? 700 : 20000);
                to[i] = malloc(bytes[i] + 1);
                from[i] = malloc(bytes[i] + 1);
                for (int64_t k = 0; k < bytes[i]; k++)
                    from[i][k] = (char)(k * 7 + i + turn);
                starts_to[i] = (int64_t)to[i];
                starts_from[i] = (int64_t)from[i];
            }
            int store = turn % 2;
            kvhost_copy(kernel, store, 1, count, none, none, store ? starts_from : starts_to, none,
                        store ? starts_to : starts_from, bytes);
            for (size_t i = 0; i < count; i++) {
                if (memcmp(to[i], from[i], bytes[i]))
                    return 1;
                free(to[i]);
                free(from[i]);
            }
        }
    }
    puts("right");
    return 0;
}
"""


@compiled
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.c"
    program.write_text(f'#include "{SOURCE}"\n{SANITIZED}')
    flags = ["-g", "-O1", "-std=c11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([str(COMPILER), *flags, "-o", str(tmp_path / "program"), str(program)], check=True)
    # vLLM puts an allocator into LD_PRELOAD of a process that imports it; the sanitizer must come first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [str(tmp_path / "program")], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
