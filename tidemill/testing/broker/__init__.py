"""A development Kafka broker: one node, one folder, no other software. Production points bootstrap.servers at its own Kafka."""

from tidemill.testing.broker.process import DevelopmentBroker
from tidemill.testing.broker.server import run_broker
from tidemill.testing.broker.state import BrokerOptions

__all__ = ["BrokerOptions", "DevelopmentBroker", "run_broker"]
