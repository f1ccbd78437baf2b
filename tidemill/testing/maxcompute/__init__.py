"""A MaxCompute emulator: tables on disk, the Storage API (v1) and the metadata calls that the pyodps client makes, over HTTP."""

from tidemill.testing.maxcompute.emulator import MaxComputeEmulator
from tidemill.testing.maxcompute.exchange import LoggedRequest
from tidemill.testing.maxcompute.faults import Fault, Faults, Operation
from tidemill.testing.maxcompute.process import MaxComputeProcess
from tidemill.testing.maxcompute.run import run_emulator

__all__ = ["Fault", "Faults", "LoggedRequest", "MaxComputeEmulator", "MaxComputeProcess", "Operation", "run_emulator"]
