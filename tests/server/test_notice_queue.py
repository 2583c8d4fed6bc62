"""The queue of notices to one session: bounded, and still believable after it ran full."""

from kvhost_proto.v1 import cache_pb2, common_pb2
from kvhost_server.notices import Ended
from kvhost_server.service import NoticeQueue

STAMP = common_pb2.Stamp(boot_id=77, generation=3)


def removed(number: int) -> cache_pb2.Notice:
    keys = number.to_bytes(8, "big")
    return cache_pb2.Notice(stamp=STAMP, removed=cache_pb2.Removed(keys=keys, key_bytes=8))


async def test_a_full_queue_becomes_one_resync_of_the_same_boot() -> None:
    """A stopped engine reads nothing: what it then gets must not look like another daemon's (I6)."""
    queue = NoticeQueue()
    for number in range(5000):
        queue.put(removed(number))
    queue.put(Ended("over"))
    first = await queue.get()
    assert isinstance(first, cache_pb2.Notice)
    assert first.HasField("resync")
    assert first.stamp == STAMP
    told = 1
    while not isinstance(notice := await queue.get(), Ended):
        assert notice.stamp.boot_id == STAMP.boot_id
        told += 1
    assert told <= 1025
