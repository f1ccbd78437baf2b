"""Formats of messages: one module each, behind `Decoder`."""

from tidemill.data.messages.arrow import ArrowDecoder
from tidemill.data.messages.decoder import Decoded, Decoder, Poison
from tidemill.data.messages.json import JsonDecoder

__all__ = ["ArrowDecoder", "Decoded", "Decoder", "JsonDecoder", "Poison"]
