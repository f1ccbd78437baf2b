"""What a topic holds."""

import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

DEADLINE_S = 20.0


def committed_messages(brokers: str, topic: str) -> list[bytes]:
    """All committed messages of the topic's one partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "test",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        found: list[bytes] = []
        until = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < until, f"only {len(found)} messages came"
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                return found
            found.append(message.value())
    finally:
        consumer.close()
